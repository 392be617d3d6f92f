"""Writers that copy a step into one row of many tensors: one native call, or two dispatched torch copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from relive import kernels

Which = tuple[int, ...] | None
"""Indices of the tensors to write; None for all."""


class RowWriter(Protocol):
    """Writes rows of tensors [rows, N, …]. A tensor with a single row has it overwritten by every step."""

    def write(self, row: int, leaves: tuple[Any, ...], which: Which = None) -> int:
        """Copy leaves as passed by the caller. Return -1, or the position of a leaf that needs conversion.

        Writes all leaves or none. None zeroes the row of an optional tensor.
        """
        ...

    def put(self, row: int, leaves: tuple[torch.Tensor | None, ...], which: Which) -> int:
        """Copy converted leaves. Return -1, or the position of a leaf whose memory cannot be read."""
        ...

    def have_moved(self) -> bool:
        """Whether the memory of a tensor has moved since construction, as after `share_memory_`."""
        ...


def row_writer(tensors: Sequence[torch.Tensor], optional: Sequence[bool], *, has_env_axis: bool) -> RowWriter:
    """Make a writer into these tensors. Without an environment axis (N = 1) callers pass leaves [...]."""
    native = kernels.columns(tensors, optional, lead=0 if has_env_axis else 1)
    return _TorchRows(tensors, has_env_axis) if native is None else _NativeRows(native, tensors)


class _NativeRows:
    def __init__(self, native: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.write = native.write
        self.have_moved = native.have_moved if kernels.exchange() else _Addresses(tensors).have_moved

    def put(self, row: int, leaves: tuple[torch.Tensor | None, ...], which: Which) -> int:
        return self.write(row, tuple(map(kernels.native_argument, leaves)), which)


class _Addresses:
    """Addresses of tensors at construction."""

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
        """Every leaf needs conversion; -1 if there are none."""
        return 0 if leaves else -1

    def put(self, row: int, leaves: tuple[torch.Tensor | None, ...], which: Which) -> int:
        if not self._views:
            # Cached views: a step is then two dispatched copies.
            rows = max(map(len, self._tensors))
            with torch.inference_mode(False):  # the views are also written outside inference mode
                views = [tuple(map(_words, tensor.unbind(0))) * (rows // len(tensor)) for tensor in self._tensors]
            self._views = list(zip(*views, strict=True))
        views = self._views[row]
        pairs = list(zip(views if which is None else [views[i] for i in which], leaves, strict=True))
        missing = [view for view, leaf in pairs if leaf is None]
        for word in (torch.int32, torch.uint8):
            copies = [(view, _words(leaf)) for view, leaf in pairs if leaf is not None and view.dtype == word]
            if copies:
                torch._foreach_copy_([view for view, _ in copies], [leaf for _, leaf in copies])
        if missing:
            torch._foreach_zero_(missing)
        return -1


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat int32, or as bytes if its items are not a multiple of four bytes.

    Devices copy many tensors in one launch only if all have the same dtype.
    """
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.view(-1).view(torch.int32 if tensor.element_size() % 4 == 0 else torch.uint8)
