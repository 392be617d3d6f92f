"""Reading many items out of many columns at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from relive import kernels
from relive.kernels.torch_ops import wide
from relive.schema.conversion import bits_of

T = TypeVar("T")


class Reader(Protocol):
    """Columns seen as flat lists of items, read by an index of int64."""

    def take(self, index: torch.Tensor, start: int, stop: int, padded: bool = False) -> list[torch.Tensor]:
        """The items `index[start:stop]` of every column, in fresh tensors [count, …].

        `padded`: an index of -1 gives zeros.
        """
        ...

    def take_into(
        self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor], padded: bool = False
    ) -> None:
        """Read the rows that `take` would into tensors of the caller's."""
        ...


def reader(columns: Sequence[torch.Tensor], lead: int, items: int) -> Reader:
    """A reader of the first `items` items of columns whose first `lead` axes count items."""
    if kernels.runs_native(columns):
        return kernels.core().Gather(list(columns), [column.ndim - lead for column in columns], items)
    if kernels.runs_triton(columns) and all(column.is_contiguous() for column in columns):
        from relive.kernels.triton.read import TritonGather  # noqa: PLC0415 (which needs Triton)

        return TritonGather(columns, lead)
    return _TorchReader(columns, lead)


class Following(Generic[T]):
    """A reader of columns that others have in their hands too: `share_memory_` moves a tensor's memory elsewhere."""

    def __init__(self, make: Callable[[], T], columns: Sequence[torch.Tensor], is_exposed: Callable[[], bool]) -> None:
        self._make, self._columns, self._is_exposed = make, columns, is_exposed
        self._reader = make()
        self._addresses = self._where() if is_exposed() else None  # before that nobody can move them

    def _where(self) -> list[int]:
        return [column.data_ptr() for column in self._columns]

    def found(self) -> T:
        """The reader of where the columns are now."""
        if self._is_exposed() and self._where() != self._addresses:
            self._reader, self._addresses = self._make(), self._where()
        return self._reader


class _TorchReader:
    def __init__(self, columns: Sequence[torch.Tensor], lead: int) -> None:
        self._dtypes = [column.dtype for column in columns]
        self._columns = [bits_of(column.flatten(0, lead - 1)) for column in columns]

    def take(self, index: torch.Tensor, start: int, stop: int, padded: bool = False) -> list[torch.Tensor]:
        rows = index if start == 0 and stop == len(index) else index[start:stop]
        if not padded:
            found = [column.index_select(0, rows) for column in self._columns]
        else:
            inside, missing = rows.clamp(min=0), rows < 0
            found = [column.index_select(0, inside) for column in self._columns]
            found = [leaf.masked_fill_(wide(missing, leaf), 0) for leaf in found]
        return [
            leaf if leaf.dtype == dtype else leaf.view(dtype) for leaf, dtype in zip(found, self._dtypes, strict=True)
        ]

    def take_into(
        self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor], padded: bool = False
    ) -> None:
        for leaf, target in zip(self.take(index, start, stop, padded), out, strict=True):
            target.copy_(leaf)
