"""Counting of launches on a device: Triton's kernels, and torch's operations other than views."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.triton.interpreter import interpreter

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero", "aten::equal"}
"""Operations that read results of a device."""
_FREE = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::new_empty", "aten::empty_like", "aten::detach",
    "aten::lift_fresh", "aten::promote_types",
}  # fmt: skip
"""Operations that are not views and launch nothing."""


class Launches(TorchDispatchMode):
    """Records the names of the kernels and operations that run inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._executor = interpreter().GridExecutor
        self._is_inside = False

    def __enter__(self) -> Launches:
        self._run = run = self._executor.__call__
        names = self.names

        def counted(executor: Any, *arguments: Any, **keywords: Any) -> Any:
            names.append(executor.fn.__name__)
            # Torch operations that the interpreter runs are not counted.
            self._is_inside = True
            try:
                return run(executor, *arguments, **keywords)
            finally:
                self._is_inside = False

        self._executor.__call__ = counted
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._executor.__call__ = self._run
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func.name() in _FREE or self._is_inside):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
