"""Reading batches of sequences: all leaves in one native call, or one by one through torch ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from relive import kernels
from relive.kernels.reader import reader
from relive.kernels.sequence_index import SequenceIndex, TorchIndex

Layout = Literal["batch_first", "time_first", "packed"]


class SequenceReader(Protocol):
    """Sequences of steps, read by their numbers."""

    def take(self, which: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        """The sequences `which[start:stop]`: steps, is_first, sizes, first rows [B], what is carried [B, …].

        Steps are [B, length, …] or time first [length, B, …], zero where their mask, the sizes, is False. Packed they
        are [total, …] as `PackedSequence` wants them, the longest sequence first, and the sizes are its batch sizes.
        """
        ...


def sequence_reader(
    index: SequenceIndex, length: int, layout: Layout, steps: list[torch.Tensor], carried: list[torch.Tensor]
) -> SequenceReader:
    """A reader of columns [T, N, …]: `steps` at every step of a sequence, `carried` at its first one."""
    if isinstance(index, TorchIndex):
        return _LeafByLeaf(index, length, layout, steps, carried)
    ndims = ([column.ndim - 2 for column in columns] for columns in (steps, carried))
    return kernels.native().SequenceGather(index, length, layout, steps, next(ndims), carried, next(ndims))


@dataclass
class _LeafByLeaf:
    index: TorchIndex
    length: int
    layout: Layout
    steps: list[torch.Tensor]
    carried: list[torch.Tensor]

    def __post_init__(self) -> None:
        is_first = self.index.is_first
        self._steps = reader([*self.steps, is_first], 2, is_first.numel())
        self._carried = reader(self.carried, 2, is_first.numel())

    def take(self, which: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        which = which[start:stop]
        if self.layout == "packed":
            which = which[self.index.count[which].argsort(descending=True, stable=True)]
        rows, mask, first = self.index.rows(which, self.length)
        if self.layout != "batch_first":
            rows, mask = rows.t().contiguous(), mask.t().contiguous()
        if self.layout == "packed":
            rows, sizes = rows[mask], mask.sum(1).cpu()  # torch wants them there
            sizes = sizes[sizes > 0]
        else:
            sizes = mask
        leaves = self._steps.take(rows.view(-1), 0, rows.numel(), True)
        return [
            *(leaf.unflatten(0, rows.shape) for leaf in leaves),
            sizes,
            first,
            *self._carried.take(first, 0, len(first)),
        ]
