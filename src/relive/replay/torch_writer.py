"""What the native ring does, with torch ops on any device: steps are written, stacks of frames rebuilt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from relive.errors import SchemaError
from relive.fields.schema import Stacked
from relive.kernels.reader import bits_of
from relive.replay.chains import Chains, of_steps
from relive.replay.ring import FINAL, PENDING, TRANSITION, Ring

if TYPE_CHECKING:
    from relive.replay.storage import ReplayStorage

Changes = list[tuple[torch.Tensor, torch.Tensor]]
"""Slots that became transitions or stopped being some, and which of them really did, in the order it happened."""


class TorchWriter:
    """One write into a storage: all of it, or a SchemaError and nothing.

    One step, or with `blocks` several in time order, of all environments or of `envs`.
    """

    def __init__(
        self,
        storage: ReplayStorage,
        leaves: tuple[torch.Tensor, ...],
        nexts: tuple[torch.Tensor, ...],
        envs: torch.Tensor | None,
        blocks: bool,
    ) -> None:
        self._storage, self._ring = storage, storage.ring
        self._changes: Changes = []
        self._env = torch.arange(self._ring.num_envs, device=storage.device) if envs is None else envs
        self._steps, self._next_steps = ([self._lifted(leaf, blocks) for leaf in group] for group in (leaves, nexts))
        self._blocks = blocks

    def chains(self) -> Chains:
        """What these steps add to what was counted; on the host."""
        return of_steps(self._storage, self._steps, self._next_steps, self._env)

    def write(self) -> Changes:
        """Store the steps."""
        storage, steps, next_steps = self._storage, self._steps, self._next_steps
        # Only the stacks of a later step of a block can be refused when something has been written already.
        undone = storage.stacked and self._blocks and storage.device.type == "cpu"
        undo = (*self._ring.state, *storage.columns) if undone else ()
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
        return leaf if self._storage.lead else leaf.unsqueeze(1)

    def _write_step(self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], env: torch.Tensor) -> None:
        storage, ring = self._storage, self._ring
        kind, first = ring.kind.view(-1), ring.first.view(-1)
        reset = ring.resetting[env] if storage.next_step else torch.zeros_like(env, dtype=torch.bool)
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
        for i, (column, leaf) in enumerate(zip(storage.columns, leaves, strict=True)):
            flat, kept = bits_of(column.flatten(0, 1)), bits_of(self._kept(i, leaf))
            flat[slots] = torch.where(_wide(fresh, kept), kept, flat[slots]) if i in storage.observed else kept
        first[slots] |= fresh
        kind[slots] = torch.where(reset, FINAL, TRANSITION).to(torch.uint8)
        ring.count[env] += (~reset).long()
        self._changes.append((slots, ~reset))
        terminated, truncated = (leaves[storage.schema.columns[name][0]] for name in ("terminated", "truncated"))
        end = (terminated | truncated) & ~reset
        if storage.next_step:
            ring.resetting[env] = end
        if storage.keeps_next:
            for column, leaf in zip(storage.next_columns, nexts, strict=True):
                bits_of(column.flatten(0, 1))[slots] = bits_of(leaf)
            ring.head[env] = row + 1
        else:
            self._write_next(nexts, row + 1, env, reset, torch.zeros_like(end) if storage.next_step else end)

    def _write_next(
        self,
        nexts: list[torch.Tensor],
        row: torch.Tensor,
        env: torch.Tensor,
        starts: torch.Tensor,
        closes: torch.Tensor,
    ) -> None:
        """The next observations as the newest rows: pending, or final where the episode is over."""
        storage, ring = self._storage, self._ring
        self._changes.append(ring.advance(row, env, torch.ones_like(closes)))
        slots = ring.at(row, env)
        for i, leaf in zip(storage.observed, nexts, strict=True):
            bits_of(storage.columns[i].flatten(0, 1))[slots] = bits_of(self._kept(i, leaf))
        ring.first.view(-1)[slots] = starts
        ring.kind.view(-1)[slots] = torch.where(closes, FINAL, PENDING).to(torch.uint8)
        ring.head[env] = row + closes.long()
        ring.open[env] = ~closes

    def _continues(self, leaves: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        """Whether the given observations are, bit by bit, the ones that the pending rows hold."""
        storage, same = self._storage, torch.ones_like(slots, dtype=torch.bool)
        for i in storage.observed:
            stored = (
                storage.stack(slots, i) if i in storage.stacked else bits_of(storage.columns[i].flatten(0, 1))[slots]
            )
            same &= _equal_bits(stored, leaves[i])
        return same

    def _check_stacks(
        self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], same: torch.Tensor, reset: torch.Tensor
    ) -> None:
        storage = self._storage
        for place, i in enumerate(storage.observed):
            field = storage.schema.fields[i]
            if not isinstance(field, Stacked):
                continue
            stack, follower = (group.movedim(1 + field.axis, 1) for group in (leaves[i], nexts[place]))
            padding = stack[:, -1:] if field.pad == "repeat" else torch.zeros_like(stack[:, -1:])
            bad = ~(same | reset | _equal_bits(stack[:, :-1], padding.expand_as(stack[:, :-1])))
            bad_next = ~(reset | _equal_bits(follower[:, :-1], stack[:, 1:]))
            if storage.device.type != "cpu":
                storage.broken += (bad | bad_next).sum()
            elif bad.any():
                raise storage.unstackable(i)
            elif bad_next.any():
                raise storage.unstackable(len(storage.columns) + place)

    def _kept(self, column: int, leaf: torch.Tensor) -> torch.Tensor:
        """What is stored of a leaf: all of it, or the newest frame of a stack."""
        field = self._storage.schema.fields[column]
        return leaf.select(1 + field.axis, field.k - 1) if isinstance(field, Stacked) else leaf


def rebuilt(ring: Ring, field: Stacked, column: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The stacks at flat slots of a column of single frames; -1 gives zeros."""
    frames, first = bits_of(column.flatten(0, 1)), ring.first.view(-1)
    at, missing, found = slots.clamp(min=0), slots < 0, [frames[slots.clamp(min=0)]]
    started = torch.zeros_like(missing)
    for _ in range(field.k - 1):
        started = started | first[at]
        at = torch.where(started, at, ring.before(at))
        frame = frames[at]
        found.append(frame if field.pad == "repeat" else frame.masked_fill(_wide(started, frame), 0))
    stack = torch.stack(found[::-1], 1 + field.axis)
    return stack.masked_fill(_wide(missing, stack), 0).view(field.dtype)


def _wide(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return flags.view(-1, *(1,) * (like.ndim - 1))


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether rows are the same bytes: NaN equals itself, and 0.0 is not -0.0."""
    # An axis of length one may have any stride, which a view of bytes minds: say that memory is in one piece.
    a, b = (x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8).view(len(x), -1) for x in (a, b))
    return (a == b).all(1)
