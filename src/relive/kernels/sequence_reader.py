"""Reading batches of sequences: all leaves in one native call, or one by one through torch ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from relive import kernels
from relive.kernels.reader import reader
from relive.kernels.sequence_index import SequenceIndex, TorchIndex

Layout = Literal["batch_first", "time_first", "packed"]


class Carried(NamedTuple):
    """A leaf that is read at the first step of a sequence."""

    items: torch.Tensor
    lead: int
    """How many of its axes count items."""
    kept: torch.Tensor | None
    """[≥ rows] which item is a row's; None: the one of the same number."""


class SequenceReader(Protocol):
    """Sequences of steps, read by their numbers."""

    def take(self, which: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        """Of the sequences `which[start:stop]`: steps, is_first, sizes, first rows [B], what is carried [B, …].

        Steps are [B, length, …] or time first [length, B, …], zero where their mask, the sizes, is False. Packed they
        are [total, …] as `PackedSequence` wants them, the longest sequence first, and the sizes are its batch sizes.
        """
        ...


def sequence_reader(
    index: SequenceIndex, length: int, layout: Layout, steps: list[torch.Tensor], carried: list[Carried]
) -> SequenceReader:
    """A reader of the columns `steps` [T, N, …] of the rollout that `index` knows."""
    if isinstance(index, TorchIndex):
        return _LeafByLeaf(index, length, layout, steps, carried)
    return kernels.native().SequenceGather(
        index, length, layout, steps, [column.ndim - 2 for column in steps], [each.items for each in carried],
        [each.items.ndim - each.lead for each in carried], [each.kept for each in carried],
    )  # fmt: skip


@dataclass
class _LeafByLeaf:
    index: TorchIndex
    length: int
    layout: Layout
    steps: list[torch.Tensor]
    carried: list[Carried]

    def __post_init__(self) -> None:
        is_first = self.index.is_first
        self._steps = reader([*self.steps, is_first], 2, is_first.numel())
        self._carried = [
            reader([each.items], each.lead, each.items.shape[: each.lead].numel()) for each in self.carried
        ]

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
        return [*(leaf.unflatten(0, rows.shape) for leaf in leaves), sizes, first, *self._at(first)]

    def _at(self, first: torch.Tensor) -> list[torch.Tensor]:
        items = [first if each.kept is None else each.kept[first] for each in self.carried]
        return [source.take(at, 0, len(at))[0] for source, at in zip(self._carried, items, strict=True)]
