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

    def rows(self, which: torch.Tensor, length: int) -> torch.Tensor:
        """The rows [B, length] of the sequences `which`, -1 behind the last step of each."""
        native = kernels.native()
        if native is None or which.device.type != "cpu":
            place = torch.arange(length, device=which.device)
            at = self.start[which].unsqueeze(1) + place
            inside = place < self.count[which].unsqueeze(1)
            return torch.where(inside, self.order[at.clamp_(max=len(self.order) - 1)], -1)
        out = torch.empty((len(which), length), dtype=torch.int64)
        native.sequence_rows(*map(kernels.buffer_of, (self.order, self.start, self.count, which)), length, _of(out))
        return out


def find_sequences(
    terminated: torch.Tensor, truncated: torch.Tensor, mask: torch.Tensor | None, cuts: Cuts
) -> SequenceIndex:
    """The sequences of a rollout's flags [T, N]; `mask` says which steps are valid, None that all are."""
    if kernels.native() is None or terminated.device.type != "cpu":
        return _find_in_torch(terminated | truncated, mask, cuts)
    order, start, count = (torch.empty(terminated.numel(), dtype=torch.int64) for _ in range(3))
    valid, sequences, longest = kernels.native().find_sequences(
        *map(kernels.buffer_of, (terminated.contiguous(), truncated.contiguous())),
        None if mask is None else _of(mask.contiguous()),
        cuts.length or 0, cuts.stride, cuts.split, cuts.keep_tail, *map(kernels.buffer_of, (order, start, count)),
    )  # fmt: skip
    return SequenceIndex(order[:valid], start[:sequences], count[:sequences], longest)


_of = kernels.buffer_of


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
