"""The sequences of a rollout: an index of their steps, and reading batches of them, natively or by torch ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from relive import kernels
from relive.kernels.reader import make_reader

Layout = Literal["batch_first", "time_first", "packed"]


@dataclass(frozen=True)
class SequenceSpec:
    """The rule that splits the steps of each environment, or of each episode, into sequences."""

    length: int | None
    """Number of steps of a full sequence; None makes every episode one sequence."""
    stride: int
    """Number of steps between the starts of two full sequences."""
    split: bool
    """Whether a sequence stops at the end of an episode."""
    keep_tail: bool
    """Whether the steps after the last full sequence become a shorter one."""


@dataclass(frozen=True)
class StepFlags:
    """The flags of a rollout's first `steps` steps."""

    steps: int
    terminated: torch.Tensor
    """Mask of terminated steps [rows, N], with at least `steps` rows."""
    truncated: torch.Tensor
    """Mask of truncated steps [rows, N], with at least `steps` rows."""
    mask: torch.Tensor | None
    """Mask of steps that are transitions [steps, N]; None if all are."""
    starts_episode: torch.Tensor
    """Mask of environments whose first step starts an episode [N]."""


class SequenceIndex(Protocol):
    """The sequences of a rollout, by number."""

    @property
    def longest(self) -> int:
        """Number of steps of the longest sequence."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class TorchSequenceIndex:
    """Sequences as slices of one list of steps, on any device."""

    is_first: torch.Tensor
    """Mask of steps that start an episode [T, N]; meaningless at steps that are not transitions."""
    order: torch.Tensor
    """Flat rows t·N + n of the transitions, sorted by environment, then time [V]."""
    start: torch.Tensor
    """Position in `order` where each sequence starts [S]."""
    count: torch.Tensor
    """Number of steps of each sequence [S]."""
    longest: int

    def __len__(self) -> int:
        return len(self.start)

    def find_rows(self, numbers: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows [B, length] of the sequences with these numbers, their mask, and the first rows [B].

        After the last step of a sequence, its rows are -1.
        """
        offset = torch.arange(length, device=numbers.device)
        start, count = self.start[numbers], self.count[numbers]
        mask = offset < count.unsqueeze(1)
        position = (start.unsqueeze(1) + offset).clamp_(max=len(self.order) - 1)
        return torch.where(mask, self.order[position], -1), mask, self.order[start]


def find_reset_rows(resetting: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """Return the mask of dummy steps [T + 1, N]: each row after a row that ended an episode and was no dummy step.

    `ended` [T, N] is the mask of rows that ended an episode, and `resetting` [N] the mask of dummy steps in the first
    row.
    """
    follows_end = torch.cat([resetting.unsqueeze(0), ended])
    # This shortcut is taken on the CPU only: on other devices it would synchronise.
    if follows_end.is_cpu and not (follows_end[:-1] & ended).any():
        return follows_end
    # A dummy step may be flagged as ended too, so in a run of consecutive ends only every second row is a dummy step.
    row = torch.arange(len(follows_end), device=follows_end.device).unsqueeze(1)
    return follows_end & ((row - torch.where(follows_end, -1, row).cummax(0).values) % 2 == 1)


def find_sequences(flags: StepFlags, spec: SequenceSpec, tensors: list[torch.Tensor]) -> SequenceIndex:
    """Return the sequences of a rollout, ordered by environment, then time.

    `tensors` are the columns that will be read: the native index is used only if the native core reads all of them.
    """
    if not kernels.runs_native(tensors):
        return _find_sequences_in_torch(flags, spec)
    return kernels.native_core().SequenceIndex(
        flags.steps, flags.terminated, flags.truncated, flags.mask, flags.starts_episode,
        spec.length or 0, spec.stride, spec.split, spec.keep_tail,
    )  # fmt: skip


def _find_sequences_in_torch(flags: StepFlags, spec: SequenceSpec) -> TorchSequenceIndex:
    ended, mask = (flags.terminated | flags.truncated)[: flags.steps], flags.mask
    steps, envs = ended.shape
    order = torch.arange(ended.numel(), device=ended.device).view(steps, envs).t().flatten()
    if mask is not None:
        order = order[mask.t().flatten()]
    is_last = order // envs == _find_last_transitions(mask, ended)[order % envs]
    if spec.split:
        is_last |= ended.flatten()[order]
    stop = is_last.nonzero().squeeze(1) + 1
    run_start = torch.cat([stop.new_zeros(1), stop[:-1]])[: len(stop)]
    size = stop - run_start
    length = size if spec.length is None else torch.full_like(size, spec.length)
    num_full = torch.where(size >= length, (size - length) // spec.stride + 1, 0)
    num_covered = torch.where(num_full > 0, (num_full - 1) * spec.stride + length, 0)
    has_tail = num_covered < size if spec.keep_tail else num_full == 0
    num_sequences = num_full + has_tail
    run = torch.arange(len(stop), device=ended.device).repeat_interleave(num_sequences)
    number_in_run = torch.arange(len(run), device=ended.device) - (num_sequences.cumsum(0) - num_sequences)[run]
    start = run_start[run] + number_in_run * spec.stride
    count = torch.minimum(length[run], stop[run] - start)
    # The rows that a mask excludes are dummy steps, and an episode starts after each dummy step.
    precedes_start = ended[:-1] if mask is None else ~mask[:-1]
    is_first = torch.cat([flags.starts_episode.unsqueeze(0), precedes_start])
    return TorchSequenceIndex(is_first, order, start, count, int(count.max()) if len(count) else 0)


def _find_last_transitions(mask: torch.Tensor | None, ended: torch.Tensor) -> torch.Tensor:
    """Return the last step of each environment that is a transition [N]."""
    steps = torch.arange(len(ended), device=ended.device).unsqueeze(1).expand_as(ended)
    return (steps if mask is None else torch.where(mask, steps, -1)).amax(0)


class SequenceReader(Protocol):
    """Reads sequences of steps by their numbers."""

    def take(self, numbers: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        """Read the sequences `numbers[start:stop]`.

        The result is: the leaves of the steps, is_first, sizes, first rows [B], the initial leaves [B, …].

        Batch first, steps are [B, length, …], time first [length, B, …]; they are zero after the end of a sequence, and
        sizes is the mask of real steps. Packed, steps are [total, …] in the order of `PackedSequence`, with the longest
        sequence first, and sizes are its batch sizes.
        """
        ...


def make_sequence_reader(
    index: SequenceIndex, length: int, layout: Layout, steps: list[torch.Tensor], initial: list[torch.Tensor]
) -> SequenceReader:
    """Return a reader of columns [T, N, …]: `steps` at every step of a sequence, `initial` at its first step."""
    if isinstance(index, TorchSequenceIndex):
        return _TorchSequenceReader(index, length, layout, steps, initial)
    ndims = ([column.ndim - 2 for column in columns] for columns in (steps, initial))
    return kernels.native_core().SequenceGather(index, length, layout, steps, next(ndims), initial, next(ndims))


@dataclass
class _TorchSequenceReader:
    index: TorchSequenceIndex
    length: int
    layout: Layout
    steps: list[torch.Tensor]
    initial: list[torch.Tensor]

    def __post_init__(self) -> None:
        is_first = self.index.is_first
        self._steps = make_reader([*self.steps, is_first], 2, is_first.numel())
        self._initial = make_reader(self.initial, 2, is_first.numel())

    def take(self, numbers: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        numbers = numbers[start:stop]
        if self.layout == "packed":
            numbers = numbers[self.index.count[numbers].argsort(descending=True, stable=True)]
        rows, mask, first_rows = self.index.find_rows(numbers, self.length)
        if self.layout != "batch_first":
            rows, mask = rows.t().contiguous(), mask.t().contiguous()
        if self.layout == "packed":
            # `PackedSequence` of torch needs its batch sizes on the host.
            rows, sizes = rows[mask], mask.sum(1).cpu()
            sizes = sizes[sizes > 0]
        else:
            sizes = mask
        leaves = self._steps.take(rows.view(-1), 0, rows.numel(), True)
        return [
            *(leaf.unflatten(0, rows.shape) for leaf in leaves),
            sizes,
            first_rows,
            *self._initial.take(first_rows, 0, len(first_rows)),
        ]
