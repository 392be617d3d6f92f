"""Which steps of a rollout make which sequences: found once, in C++ or torch ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recollect import kernels


@dataclass(frozen=True)
class Cuts:
    """How the valid steps of an environment, or of each of its episodes, are cut into sequences."""

    length: int | None
    """Of a full sequence; None: whatever is cut is one sequence."""
    stride: int
    """Between the starts of full sequences."""
    split: bool
    """Whether an episode's end cuts."""
    keep_tail: bool
    """One more, shorter sequence where full ones leave something over."""


@dataclass(frozen=True)
class SequenceIndex:
    """Sequences as runs of one list of steps."""

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
        """Of the sequences `which`: rows [B, length], -1 behind the last step of each; the mask; the first rows [B]."""
        native = kernels.native()
        if native is None or which.device.type != "cpu":
            place = torch.arange(length, device=which.device)
            start, count = self.start[which], self.count[which]
            mask = place < count.unsqueeze(1)
            at = (start.unsqueeze(1) + place).clamp_(max=len(self.order) - 1)
            return torch.where(mask, self.order[at], -1), mask, self.order[start]
        out = None
        if not native.exchange():
            shape = (len(which), length)
            out = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.bool), torch.empty_like(which)
        given = map(kernels.buffer_of, (self.order, self.start, self.count, which))
        made = native.sequence_rows(*given, length, None if out is None else tuple(map(kernels.buffer_of, out)))
        return tuple(made) if out is None else out


def find_sequences(
    terminated: torch.Tensor, truncated: torch.Tensor, mask: torch.Tensor | None, cuts: Cuts
) -> SequenceIndex:
    """The sequences of a rollout's flags [T, N]; `mask` says which steps are valid, None that all are."""
    if kernels.native() is None or terminated.device.type != "cpu":
        return _find_in_torch(terminated | truncated, mask, cuts)
    order, start, count = (torch.empty(terminated.numel(), dtype=torch.int64) for _ in range(3))
    valid, sequences, longest = kernels.native().find_sequences(
        *map(kernels.buffer_of, (terminated.contiguous(), truncated.contiguous())),
        kernels.buffer_of(None if mask is None else mask.contiguous()),
        cuts.length or 0, cuts.stride, cuts.split, cuts.keep_tail, *map(kernels.buffer_of, (order, start, count)),
    )  # fmt: skip
    return SequenceIndex(order[:valid], start[:sequences], count[:sequences], longest)


def _find_in_torch(ended: torch.Tensor, mask: torch.Tensor | None, cuts: Cuts) -> SequenceIndex:
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
    return SequenceIndex(order, start, count, int(count.max()) if len(count) else 0)


def _last_valid(mask: torch.Tensor | None, ended: torch.Tensor) -> torch.Tensor:
    """The last valid step of each environment [N]."""
    steps = torch.arange(len(ended), device=ended.device).unsqueeze(1).expand_as(ended)
    return (steps if mask is None else torch.where(mask, steps, -1)).amax(0)
