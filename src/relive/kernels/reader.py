"""Readers of items from many columns by an index, and random orders of items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from relive import kernels
from relive.kernels.torch_ops import add_axes
from relive.rng import Randomness
from relive.schema.conversion import as_indexable

T = TypeVar("T")


class ItemReader(Protocol):
    """Reads items of several columns by an int64 index."""

    def take(self, index: torch.Tensor, start: int, stop: int, padded: bool = False) -> list[torch.Tensor]:
        """Return the items `index[start:stop]` of every column, in new tensors [count, …].

        With `padded`, an index of -1 gives zeros.
        """
        ...

    def take_into(
        self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor], padded: bool = False
    ) -> None:
        """Copy the items that `take` returns into the tensors `out`."""
        ...


def make_reader(columns: Sequence[torch.Tensor], lead_ndim: int, num_items: int) -> ItemReader:
    """Return a reader of columns; the first `lead_ndim` axes of each column count as one flat axis."""
    if kernels.runs_native(columns):
        return kernels.native_core().Gather(list(columns), [column.ndim - lead_ndim for column in columns], num_items)
    if kernels.runs_triton(columns) and all(column.is_contiguous() for column in columns):
        from relive.kernels.triton.read import TritonGather  # noqa: PLC0415 (needs Triton)

        return TritonGather(columns, lead_ndim)
    return _TorchItemReader(columns, lead_ndim)


class RebindingReader(Generic[T]):
    """Holds a reader, and remakes it after the memory of its columns moved, as by `share_memory_` of torch."""

    def __init__(self, make: Callable[[], T], columns: Sequence[torch.Tensor], is_exposed: Callable[[], bool]) -> None:
        self._make, self._columns, self._is_exposed = make, columns, is_exposed
        self._reader = make()
        # Addresses are compared only for exposed tensors: without a reference, no caller can move their memory.
        self._addresses = self._data_pointers() if is_exposed() else None

    def _data_pointers(self) -> list[int]:
        return [column.data_ptr() for column in self._columns]

    def current_reader(self) -> T:
        """Return a reader of the columns at their present addresses."""
        if self._is_exposed() and self._data_pointers() != self._addresses:
            self._reader, self._addresses = self._make(), self._data_pointers()
        return self._reader


class _TorchItemReader:
    def __init__(self, columns: Sequence[torch.Tensor], lead: int) -> None:
        self._dtypes = [column.dtype for column in columns]
        self._columns = [as_indexable(column.flatten(0, lead - 1)) for column in columns]

    def take(self, index: torch.Tensor, start: int, stop: int, padded: bool = False) -> list[torch.Tensor]:
        items = index if start == 0 and stop == len(index) else index[start:stop]
        if not padded:
            leaves = [column.index_select(0, items) for column in self._columns]
        else:
            inside, is_padding = items.clamp(min=0), items < 0
            leaves = [column.index_select(0, inside) for column in self._columns]
            leaves = [leaf.masked_fill_(add_axes(is_padding, leaf), 0) for leaf in leaves]
        return [
            leaf if leaf.dtype == dtype else leaf.view(dtype) for leaf, dtype in zip(leaves, self._dtypes, strict=True)
        ]

    def take_into(
        self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor], padded: bool = False
    ) -> None:
        for leaf, target in zip(self.take(index, start, stop, padded), out, strict=True):
            target.copy_(leaf)


def copy_shuffled(index: torch.Tensor, random: Randomness) -> torch.Tensor:
    """Return the entries of `index` [n] in a random order, in a new tensor."""
    if index.device.type != "cpu":
        generator = random.generator(index.device)
        return index[torch.randperm(len(index), generator=generator, device=index.device)]
    index = index.clone()
    if kernels.runs_native((index,)):
        kernels.native_core().shuffle(index, random.capsule)
    else:
        np.random.Generator(random.bits).shuffle(index.numpy())
    return index


def draw_permutation(count: int, random: Randomness, device: torch.device) -> torch.Tensor:
    """Return the numbers 0 to `count` − 1 in a random order."""
    if device.type == "cpu" and kernels.native_core() is not None:
        return kernels.native_core().permutation(count, random.capsule)
    if device.type != "cpu":
        return torch.randperm(count, generator=random.generator(device), device=device)
    return copy_shuffled(torch.arange(count, device=device), random)
