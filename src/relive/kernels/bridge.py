"""The native core under a torch without DLPack's C exchange API (before 2.10).

There the core reads numpy arrays instead of tensors and cannot return tensors. The classes here have the methods of the
native ones: they pass tensors as numpy views and allocate the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relive.kernels import _native


def as_array(value: Any) -> Any:
    """Replace tensors by numpy views, also inside lists, tuples and dicts; return anything else unchanged."""
    if isinstance(value, dict):
        return {name: as_array(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(as_array, value))
    plain = type(value) is torch.Tensor and value.is_cpu and value.layout == torch.strided
    if not plain or value.requires_grad or value.is_neg() or value.is_conj() or value.dtype == torch.bfloat16:
        return value
    return value.numpy()


def _new_tensor(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="cpu")


class _Bridge:
    """A native object; tensors passed to its methods become numpy views."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._core, name)
        return (lambda *arguments: member(*map(as_array, arguments))) if callable(member) else member

    def _map(self, kernel: str, index: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        out = _new_tensor(len(index), dtype)
        getattr(self._core, kernel)(index.contiguous().numpy(), out.numpy())
        return out


class RingMemory(_Bridge):
    """The ring of a replay buffer."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(_native.RingMemory(*map(as_array, arguments)))

    def draw(self, count: int, bits: object, _: None) -> torch.Tensor | None:
        out = _new_tensor(count)
        return None if self._core.draw(count, bits, out.numpy()) is None else out

    def ids(self, slots: torch.Tensor, _: None) -> torch.Tensor:
        return self._map("ids", slots)

    def count_following(self, slots: torch.Tensor, _: None) -> torch.Tensor:
        return self._map("count_following", slots)

    def count_preceding(self, slots: torch.Tensor, _: None) -> torch.Tensor:
        return self._map("count_preceding", slots)

    def locate(self, ids: torch.Tensor, _: None) -> torch.Tensor | int:
        out = _new_tensor(len(ids))
        result = self._core.locate(ids.numpy(), out.numpy())
        return result if isinstance(result, int) else out


class WriteBack(_Bridge):
    """The rewritable leaves of a ring."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(_native.WriteBack(*map(as_array, arguments)))


class PriorityTree(_Bridge):
    sizes = None if _native is None else _native.PriorityTree.sizes

    def __init__(self, *arguments: Any) -> None:
        super().__init__(_native.PriorityTree(*map(as_array, arguments)))

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        return self._map("get", leaves, torch.float64)

    def draw(self, count: int, bits: object) -> torch.Tensor | None:
        out = _new_tensor(count)
        return None if self._core.draw(count, bits, out.numpy()) is None else out

    def draw_weighted(self, count: int, bits: object, beta: float, by_smallest: bool) -> Any:
        from relive.kernels.priority import importance_weights  # noqa: PLC0415 (imports this module)

        leaves = self.draw(count, bits)
        if leaves is None:
            return None
        priorities = self.get(leaves)
        return leaves, importance_weights(priorities, self._core.smallest() if by_smallest else priorities.min(), beta)

    def update(self, *_: Any) -> None:
        """Return None: updates are not supported, and the caller uses `set`."""


class Gather(_Bridge):
    """Reads items of many columns."""

    def __init__(self, columns: Sequence[torch.Tensor], item_axes: list[int], items: int) -> None:
        super().__init__(_native.Gather(as_array(list(columns)), item_axes, items))
        self._item_layouts = [
            (column.shape[column.ndim - axes :], column.dtype) for column, axes in zip(columns, item_axes, strict=True)
        ]

    def take(self, index: torch.Tensor, start: int, stop: int, padded: bool = False) -> list[torch.Tensor]:
        out = [torch.empty((stop - start, *shape), dtype=dtype, device="cpu") for shape, dtype in self._item_layouts]
        self._core.take_into(index.numpy(), start, stop, as_array(out), padded)
        return out
