"""What the native ring does when steps are written, with torch ops on any device."""

from __future__ import annotations

import torch

from relive.errors import SchemaError
from relive.fields.schema import Stacked
from relive.kernels.reader import bits_of
from relive.kernels.torch_ops import wide
from relive.replay.chains import Chains, of_steps
from relive.replay.frames import leaf_at
from relive.replay.ring import FINAL, PENDING, TRANSITION
from relive.replay.row_memory import RowMemory

Changes = list[tuple[torch.Tensor, torch.Tensor]]
"""Slots that became transitions or stopped being some, and which of them really did, in the order it happened."""


class TorchWriter:
    """One write into a memory: all of it, or a SchemaError and nothing.

    One step, or with `blocks` several in time order, of all environments or of `envs`.
    """

    def __init__(
        self,
        memory: RowMemory,
        leaves: tuple[torch.Tensor, ...],
        nexts: tuple[torch.Tensor, ...],
        envs: torch.Tensor | None,
        blocks: bool,
    ) -> None:
        self._memory, self._ring = memory, memory.ring
        self._changes: Changes = []
        self._env = torch.arange(self._ring.num_envs, device=memory.device) if envs is None else envs
        self._steps, self._next_steps = ([self._lifted(leaf, blocks) for leaf in group] for group in (leaves, nexts))
        self._blocks = blocks

    def chains(self) -> Chains:
        """What these steps add to what was counted; on the host."""
        return of_steps(self._memory, self._steps, self._next_steps, self._env)

    def write(self) -> Changes:
        """Store the steps."""
        memory, steps, next_steps = self._memory, self._steps, self._next_steps
        # Only the stacks of a later step of a block can be refused when something has been written already.
        undone = memory.stacked and self._blocks and memory.device.type == "cpu"
        undo = (*self._ring.state.values(), *memory.leaves) if undone else ()
        before = [tensor.clone() for tensor in undo]
        for t in range(len(steps[0])):
            try:
                self._write_step([leaf[t] for leaf in steps], [leaf[t] for leaf in next_steps], self._env)
            except SchemaError:
                for tensor, old in zip(undo, before, strict=True):
                    tensor.copy_(old)
                raise
        return self._changes

    def _lifted(self, leaf: torch.Tensor, blocks: bool) -> torch.Tensor:
        leaf = leaf if blocks else leaf.unsqueeze(0)
        return leaf if self._memory.lead else leaf.unsqueeze(1)

    def _write_step(self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], env: torch.Tensor) -> None:
        memory, ring = self._memory, self._ring
        kind, first = ring.kind.view(-1), ring.first.view(-1)
        reset = ring.resetting[env] if memory.next_step else torch.zeros_like(env, dtype=torch.bool)
        row, was_open = ring.head[env], ring.open[env]
        pending = ring.at(row, env)
        same = was_open & self._continues(leaves, pending)
        self._check_stacks(leaves, nexts, same, reset)
        cut = was_open & ~reset & ~same
        kind[pending] = torch.where(cut, FINAL, kind[pending]).to(torch.uint8)
        row = row + cut.long()
        fresh = ~was_open | cut
        self._changes.append(ring.advance(row, env, fresh))
        slots = ring.at(row, env)
        for i, (column, leaf) in enumerate(zip(memory.leaves, leaves, strict=True)):
            flat, kept = bits_of(column.flatten(0, 1)), bits_of(self._kept(i, leaf))
            flat[slots] = torch.where(wide(fresh, kept), kept, flat[slots]) if i in memory.observed else kept
        first[slots] |= fresh
        kind[slots] = torch.where(reset, FINAL, TRANSITION).to(torch.uint8)
        ring.count[env] += (~reset).long()
        self._changes.append((slots, ~reset))
        terminated, truncated = (leaves[memory.schema.leaf_indices[name][0]] for name in ("terminated", "truncated"))
        end = (terminated | truncated) & ~reset
        if memory.next_step:
            ring.resetting[env] = end
        if memory.keeps_next:
            for column, leaf in zip(memory.next_leaves, nexts, strict=True):
                bits_of(column.flatten(0, 1))[slots] = bits_of(leaf)
            ring.head[env] = row + 1
        else:
            self._write_next(nexts, row + 1, env, reset, torch.zeros_like(end) if memory.next_step else end)

    def _write_next(
        self,
        nexts: list[torch.Tensor],
        row: torch.Tensor,
        env: torch.Tensor,
        starts: torch.Tensor,
        closes: torch.Tensor,
    ) -> None:
        """The next observations as the newest rows: pending, or final where the episode is over."""
        memory, ring = self._memory, self._ring
        self._changes.append(ring.advance(row, env, torch.ones_like(closes)))
        slots = ring.at(row, env)
        for i, leaf in zip(memory.observed, nexts, strict=True):
            bits_of(memory.leaves[i].flatten(0, 1))[slots] = bits_of(self._kept(i, leaf))
        ring.first.view(-1)[slots] = starts
        ring.kind.view(-1)[slots] = torch.where(closes, FINAL, PENDING).to(torch.uint8)
        ring.head[env] = row + closes.long()
        ring.open[env] = ~closes

    def _continues(self, leaves: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        """Whether the given observations are, bit by bit, the ones that the pending rows hold."""
        memory, same = self._memory, torch.ones_like(slots, dtype=torch.bool)
        for i in memory.observed:
            same &= _equal_bits(leaf_at(memory, i, slots), leaves[i])
        return same

    def _check_stacks(
        self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], same: torch.Tensor, reset: torch.Tensor
    ) -> None:
        memory = self._memory
        for place, i in enumerate(memory.observed):
            field = memory.schema.fields[i]
            if not isinstance(field, Stacked):
                continue
            stack, follower = (group.movedim(1 + field.axis, 1) for group in (leaves[i], nexts[place]))
            padding = stack[:, -1:] if field.pad == "repeat" else torch.zeros_like(stack[:, -1:])
            bad = ~(same | reset | _equal_bits(stack[:, :-1], padding.expand_as(stack[:, :-1])))
            bad_next = ~(reset | _equal_bits(follower[:, :-1], stack[:, 1:]))
            if memory.device.type != "cpu":
                memory.broken += (bad | bad_next).sum()
            elif bad.any():
                raise memory.unstackable(i)
            elif bad_next.any():
                raise memory.unstackable(len(memory.leaves) + place)

    def _kept(self, column: int, leaf: torch.Tensor) -> torch.Tensor:
        """What is stored of a leaf: all of it, or the newest frame of a stack."""
        field = self._memory.schema.fields[column]
        return leaf.select(1 + field.axis, field.k - 1) if isinstance(field, Stacked) else leaf


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether rows are the same bytes: NaN equals itself, and 0.0 is not -0.0."""
    # An axis of length one may have any stride, which a view of bytes minds: say that memory is in one piece.
    a, b = (x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8).view(len(x), -1) for x in (a, b))
    return (a == b).all(1)
