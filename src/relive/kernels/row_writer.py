"""Copying one step into one row of many tensors: one native call, or two dispatched copies through torch ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from relive import kernels

Which = tuple[int, ...] | None
"""The tensors that are written; None is all of them."""


class RowWriter(Protocol):
    """Writes row after row of tensors [rows, N, …]; of a tensor with one row it is always that one."""

    def write(self, row: int, leaves: tuple[Any, ...], which: Which = None) -> int:
        """Copy leaves as a caller passed them: -1, or the place of one that must be converted first.

        Nothing is written unless all are. None zeroes the row of an optional tensor.
        """
        ...

    def put(self, row: int, leaves: tuple[torch.Tensor | None, ...], which: Which) -> int:
        """Copy leaves that were converted: -1, or the place of one whose memory cannot be read."""
        ...

    def have_moved(self) -> bool:
        """Whether a tensor has other memory than when the writer was made, as after `share_memory_`."""
        ...


def row_writer(tensors: Sequence[torch.Tensor], optional: Sequence[bool], *, has_env_axis: bool) -> RowWriter:
    """A writer into these tensors; without an environment axis callers pass leaves [...] for N = 1."""
    native = kernels.columns(tensors, optional, lead=0 if has_env_axis else 1)
    return _TorchRows(tensors, has_env_axis) if native is None else _NativeRows(native, tensors)


class _NativeRows:
    def __init__(self, native: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.write = native.write
        self.have_moved = native.have_moved if kernels.exchange() else _Addresses(tensors).have_moved

    def put(self, row: int, leaves: tuple[torch.Tensor | None, ...], which: Which) -> int:
        return self.write(row, tuple(map(kernels.buffer_of, leaves)), which)


class _Addresses:
    """The addresses of tensors when the writer was made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._addresses = tensors, [tensor.data_ptr() for tensor in tensors]

    def have_moved(self) -> bool:
        return [tensor.data_ptr() for tensor in self._tensors] != self._addresses


class _TorchRows:
    def __init__(self, tensors: Sequence[torch.Tensor], has_env_axis: bool) -> None:
        self._tensors = [tensor if has_env_axis else tensor.squeeze(1) for tensor in tensors]
        self.have_moved = _Addresses(tensors).have_moved
        self._views: list[tuple[torch.Tensor, ...]] = []

    def write(self, row: int, leaves: tuple[Any, ...], which: Which = None) -> int:
        """Takes nothing as it is; of no leaves there is none to convert."""
        return 0 if leaves else -1

    def put(self, row: int, leaves: tuple[torch.Tensor | None, ...], which: Which) -> int:
        if not self._views:
            # Made once: a step is then two dispatched copies.
            rows = max(map(len, self._tensors))
            with torch.inference_mode(False):  # they are written later, in whatever mode
                views = [tuple(map(_words, tensor.unbind(0))) * (rows // len(tensor)) for tensor in self._tensors]
            self._views = list(zip(*views, strict=True))
        views = self._views[row]
        pairs = list(zip(views if which is None else [views[i] for i in which], leaves, strict=True))
        missing = [view for view, leaf in pairs if leaf is None]
        for word in (torch.int32, torch.uint8):
            given = [(view, _words(leaf)) for view, leaf in pairs if leaf is not None and view.dtype == word]
            if given:
                torch._foreach_copy_([view for view, _ in given], [leaf for _, leaf in given])
        if missing:
            torch._foreach_zero_(missing)
        return -1


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as words of four bytes, or as bytes.

    Devices copy many tensors in one launch only if all have the same dtype.
    """
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.view(-1).view(torch.int32 if tensor.element_size() % 4 == 0 else torch.uint8)
