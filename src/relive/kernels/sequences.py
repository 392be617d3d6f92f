"""The sequences of a rollout: an index of their steps, and reading batches of them, natively or by torch ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from relive import kernels
from relive.kernels.reader import reader

Layout = Literal["batch_first", "time_first", "packed"]


@dataclass(frozen=True)
class Cuts:
    """How the valid steps of an environment, or of each of its episodes, are cut into sequences."""

    length: int | None
    """The length of a full sequence; None: an episode is one sequence."""
    stride: int
    """Between the starts of full sequences."""
    split: bool
    """Whether an episode's end cuts."""
    keep_tail: bool
    """One more, shorter sequence where full ones leave something over."""


@dataclass(frozen=True)
class Flags:
    """The sequences of a rollout's first `steps` steps; flags may have more rows [≥ steps, N]."""

    steps: int
    terminated: torch.Tensor
    truncated: torch.Tensor
    mask: torch.Tensor | None
    """[steps, N] which are valid; None: all."""
    starting: torch.Tensor
    """Mask of environments whose first step starts an episode [N]."""


class SequenceIndex(Protocol):
    """The sequences of a rollout, by number."""

    @property
    def longest(self) -> int:
        """How many steps the longest one has."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class TorchIndex:
    """Sequences as runs of one list of steps."""

    is_first: torch.Tensor
    """[T, N] which steps start an episode, as far as they are valid."""
    order: torch.Tensor
    """[V] flat rows t·N + n of the valid steps, by environment, then time."""
    start: torch.Tensor
    """[S] where in `order` a sequence starts."""
    count: torch.Tensor
    """[S] how many steps it has."""
    longest: int

    def __len__(self) -> int:
        return len(self.start)

    def rows(self, which: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the sequences `which` [B, length], -1 after the last step of each; the mask; the first rows [B]."""
        place = torch.arange(length, device=which.device)
        start, count = self.start[which], self.count[which]
        mask = place < count.unsqueeze(1)
        at = (start.unsqueeze(1) + place).clamp_(max=len(self.order) - 1)
        return torch.where(mask, self.order[at], -1), mask, self.order[start]


def reset_rows(resetting: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """Mask of dummy steps [T + 1, N]: the rows after a row that `ended` [T, N], unless that row was a reset itself.

    `resetting` [N] are the resets of the first row.
    """
    after = torch.cat([resetting.unsqueeze(0), ended])
    if after.is_cpu and not (after[:-1] & ended).any():  # elsewhere it costs more to ask than to go on
        return after
    # A reset row that carries a flag of its own: of several ends in a row every other one is a reset.
    place = torch.arange(len(after), device=after.device).unsqueeze(1)
    return after & ((place - torch.where(after, -1, place).cummax(0).values) % 2 == 1)


def find_sequences(flags: Flags, cuts: Cuts, tensors: list[torch.Tensor]) -> SequenceIndex:
    """The sequences of a rollout, by environment, then time, for whoever reads these tensors at them."""
    if not kernels.reads_natively(tensors):
        return _find_in_torch(flags, cuts)
    return kernels.native().SequenceIndex(
        flags.steps, flags.terminated, flags.truncated, flags.mask, flags.starting,
        cuts.length or 0, cuts.stride, cuts.split, cuts.keep_tail,
    )  # fmt: skip


def _find_in_torch(flags: Flags, cuts: Cuts) -> TorchIndex:
    ended, mask = (flags.terminated | flags.truncated)[: flags.steps], flags.mask
    steps, envs = ended.shape
    order = torch.arange(ended.numel(), device=ended.device).view(steps, envs).t().flatten()
    if mask is not None:
        order = order[mask.t().flatten()]
    closes = order // envs == _last_valid(mask, ended)[order % envs]
    if cuts.split:
        closes |= ended.flatten()[order]
    stop = closes.nonzero().squeeze(1) + 1
    begin = torch.cat([stop.new_zeros(1), stop[:-1]])[: len(stop)]
    size = stop - begin
    length = size if cuts.length is None else torch.full_like(size, cuts.length)
    full = torch.where(size >= length, (size - length) // cuts.stride + 1, 0)
    covered = torch.where(full > 0, (full - 1) * cuts.stride + length, 0)
    tail = covered < size if cuts.keep_tail else full == 0
    sequences = full + tail
    run = torch.arange(len(stop), device=ended.device).repeat_interleave(sequences)
    nth = torch.arange(len(run), device=ended.device) - (sequences.cumsum(0) - sequences)[run]
    start = begin[run] + nth * cuts.stride
    count = torch.minimum(length[run], stop[run] - start)
    before = ended[:-1] if mask is None else ~mask[:-1]  # a row that is not valid only resets
    is_first = torch.cat([flags.starting.unsqueeze(0), before])
    return TorchIndex(is_first, order, start, count, int(count.max()) if len(count) else 0)


def _last_valid(mask: torch.Tensor | None, ended: torch.Tensor) -> torch.Tensor:
    """The last valid step of each environment [N]."""
    steps = torch.arange(len(ended), device=ended.device).unsqueeze(1).expand_as(ended)
    return (steps if mask is None else torch.where(mask, steps, -1)).amax(0)


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
