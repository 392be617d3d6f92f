"""What the native ring does when steps are written, with torch ops on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from relive.errors import SchemaError
from relive.kernels.torch_ops import wide
from relive.replay.chains import Chains, of_step
from relive.replay.frames import leaf_at
from relive.replay.ring import FINAL, HISTORY, PENDING, TRANSITION
from relive.replay.row_memory import RowMemory
from relive.schema.conversion import bits_of, numpy_view
from relive.schema.fields import Stacked


class Written(NamedTuple):
    """One step that was written: its rows and, where next observations are shared, the rows after them."""

    envs: torch.Tensor | None
    """Which environments it is of; None: all."""
    ids: torch.Tensor
    """[2, K], or [1, K] where next observations are stored."""
    slots: torch.Tensor
    """Where they are: none of those after the first is a transition."""
    is_reset: torch.Tensor | None
    """Which rows only reset, and are no transitions [K]; None: none."""
    left: torch.Tensor | None
    """Slots of rows that may no longer be drawn [2 K]; None: they were overwritten."""


class Changes:
    """Assignments that are made later, in their order; making them twice leads to the same."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []

    def add(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Call a function of tensors later."""
        self._calls.append(partial(function, *arguments, **options))

    def make(self) -> None:
        """Make all changes."""
        for call in self._calls:
            call()


class TorchWriter:
    """One write into a memory: all of it, or a SchemaError and nothing.

    One step, or with `blocks` several in time order, of all environments or of `envs`. A step is computed from what is
    stored, without changing it, and then assigned: `write` may be interrupted anywhere and called again. With `counts`,
    `counted` tells afterwards how the steps are joined, which waits for the device.
    """

    def __init__(
        self,
        memory: RowMemory,
        leaves: tuple[torch.Tensor, ...],
        nexts: tuple[torch.Tensor, ...],
        envs: torch.Tensor | None,
        blocks: bool,
        *,
        counts: bool,
    ) -> None:
        self._memory, self._ring, self._envs = memory, memory.ring, envs
        self._counts, self.counted = counts, Chains()
        ids = self._ring.first_ids[:1] if memory.keeps_next else self._ring.first_ids
        self._first_ids = ids if envs is None else ids[:, envs]
        self._steps, self._next_steps = ([self._lifted(leaf, blocks) for leaf in group] for group in (leaves, nexts))
        ring, self._kind, self._first = self._ring, self._ring.kind.view(-1), self._ring.first.view(-1)
        self._own = (ring.head, ring.open, ring.resetting, ring.count)
        """What the ring knows of these environments: its own tensors, or copies that are put back at the end."""
        if envs is not None:
            self._own = tuple(each[envs] for each in self._own)
        self._head, self._open, self._resetting, self._count = self._own
        self._written: list[Written] = []
        """The steps that are stored."""
        self._coming: tuple[Written, Changes, Chains] | None = None
        """The step that is being stored, its assignments, and how it is joined."""
        # Only the stacks of a later step of a block can be refused when something has been written already.
        undone = memory.stacked and blocks and memory.device.type == "cpu"
        undo = (*self._own, ring.kind, ring.first, *memory.leaves) if undone else ()
        self._undo = [(tensor, tensor.clone()) for tensor in undo]
        self.refusal: SchemaError | None = None
        """Why nothing was written."""
        self.has_tables = True
        """Tables of the stored rows have not begun to follow."""

    def write(self) -> list[Written]:
        """Store the steps, or those that are left after an interruption."""
        ring, steps, next_steps = self._ring, self._steps, self._next_steps
        while self.refusal is None and len(self._written) < len(steps[0]):
            t = len(self._written)
            try:
                if self._coming is None:
                    self._coming = self._planned([leaf[t] for leaf in steps], [leaf[t] for leaf in next_steps])
                written, changes, counted = self._coming
                changes.make()
                after, counted = [*self._written, written], self.counted + counted
                self._written, self.counted, self._coming = after, counted, None  # no call: no signal comes
            except SchemaError as error:
                self.refusal = error
        if self.refusal is not None:
            for tensor, old in self._undo:
                tensor.copy_(old)
        elif self._envs is not None:
            for tensor, own in zip((ring.head, ring.open, ring.resetting, ring.count), self._own, strict=True):
                tensor[self._envs] = own
        return self._written

    def _lifted(self, leaf: torch.Tensor, blocks: bool) -> torch.Tensor:
        leaf = leaf if blocks else leaf.unsqueeze(0)
        return leaf if self._memory.lead else leaf.unsqueeze(1)

    def _planned(self, leaves: list[torch.Tensor], nexts: list[torch.Tensor]) -> tuple[Written, Changes, Chains]:
        """One step as it will be stored, the assignments that store it, and what it adds to `counted`."""
        memory, ring, changes = self._memory, self._ring, Changes()
        counted = Chains()
        if self._counts:
            obs, env = [leaves[i] for i in memory.observed], self._first_ids[0]
            counted = of_step(memory, obs, env, self._head, self._open, self._resetting)
            rewards = (leaves[i] for i in memory.schema.leaf_indices["reward"])
            infinite = any(x.is_floating_point() and not _is_finite(x) for x in rewards)
            counted += Chains(infinite=int(infinite))
        reset = self._resetting.clone() if memory.next_step else None
        pending = torch.add(self._first_ids[0], self._head, alpha=ring.num_envs) % ring.size
        goes_on = self._continuing(leaves, nexts, pending, reset, changes)
        head = self._head + (self._open > goes_on)  # of flags: open, and not going on
        ids = torch.add(self._first_ids, head, alpha=ring.num_envs)
        slots = ids % ring.size
        left, count = self._retire(ids, slots, changes)
        # The pending row is final, or else what the row itself is, which takes this slot if it is not cut.
        changes.add(self._kind.index_fill_, 0, pending, FINAL)
        self._write_row(leaves, slots[0], ~goes_on, reset, changes)
        changes.add(torch.add, count, 1 if reset is None else ~reset, out=self._count)
        terminated, truncated = (leaves[memory.schema.leaf_indices[name][0]] for name in ("terminated", "truncated"))
        end = terminated | truncated
        if memory.keeps_next:
            for column, leaf in zip(memory.next_leaves, nexts, strict=True):
                changes.add(bits_of(column.flatten(0, 1)).index_copy_, 0, slots[0], bits_of(leaf))
            changes.add(torch.add, head, 1, out=self._head)
        else:
            self._write_next(nexts, slots[1], head, reset, None if memory.next_step else end, changes)
        if reset is not None:
            changes.add(self._resetting.copy_, end & ~reset)
        return Written(self._envs, ids, slots, reset, left), changes, counted

    def _continuing(
        self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], pending: torch.Tensor, reset: torch.Tensor | None,
        changes: Changes,
    ) -> torch.Tensor:  # fmt: skip
        """Mask of steps that start from the pending observations, or reset there; heads pass those of the others."""
        memory = self._memory
        same = self._open
        for i in memory.observed if not memory.keeps_next else ():
            same = same & _equal_bits(leaf_at(memory, i, pending), leaves[i])
        if memory.stacked:
            self._check_stacks(leaves, nexts, same, reset, changes)
        return same if reset is None else same | (self._open & reset)

    def _retire(
        self, ids: torch.Tensor, slots: torch.Tensor, changes: Changes
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Mark the transitions that leave the window as rows enter it, where they stay as history; count the others."""
        ring = self._ring
        stay = ring.slots > ring.alive
        leaving = ((ids - ring.alive * ring.num_envs) % ring.size if stay else slots).view(-1)
        kind = self._kind.index_select(0, leaving)
        leave = kind == TRANSITION
        if stay:
            changes.add(self._kind.index_copy_, 0, leaving, kind.masked_fill_(leave, HISTORY))
        return leaving if stay else None, self._count - leave.view(ids.shape).sum(0)

    def _write_row(
        self, leaves: list[torch.Tensor], slots: torch.Tensor, fresh: torch.Tensor, reset: torch.Tensor | None,
        changes: Changes,
    ) -> None:  # fmt: skip
        """The step itself: a transition, or final where it only resets."""
        memory = self._memory
        for i, (column, leaf) in enumerate(zip(memory.leaves, leaves, strict=True)):
            flat, kept = bits_of(column.flatten(0, 1)), bits_of(self._kept(i, leaf))
            if reset is not None and i in memory.observed:  # of a reset, what the step before led to
                kept = torch.where(wide(fresh, kept), kept, flat.index_select(0, slots))
            changes.add(flat.index_copy_, 0, slots, kept)
        if reset is None:
            changes.add(self._kind.index_fill_, 0, slots, TRANSITION)
        else:
            changes.add(self._kind.index_copy_, 0, slots, reset.view(torch.uint8) + TRANSITION)  # FINAL is one more
            fresh |= self._first.index_select(0, slots)  # a reset that a step led to starts an episode
        changes.add(self._first.index_copy_, 0, slots, fresh)

    def _write_next(
        self, nexts: list[torch.Tensor], slots: torch.Tensor, head: torch.Tensor, starts: torch.Tensor | None,
        closes: torch.Tensor | None, changes: Changes,
    ) -> None:  # fmt: skip
        """The next observations as the newest rows: pending, or final where the episode is over."""
        memory = self._memory
        for i, leaf in zip(memory.observed, nexts, strict=True):
            flat = bits_of(memory.leaves[i].flatten(0, 1))
            changes.add(flat.index_copy_, 0, slots, bits_of(self._kept(i, leaf)))
        if starts is None:
            changes.add(self._first.index_fill_, 0, slots, False)
        else:
            changes.add(self._first.index_copy_, 0, slots, starts)
        if closes is None:
            changes.add(self._kind.index_fill_, 0, slots, PENDING)
            changes.add(torch.add, head, 1, out=self._head)
            changes.add(self._open.fill_, True)
        else:
            changes.add(self._kind.index_copy_, 0, slots, PENDING - closes.view(torch.uint8))  # FINAL is one less
            changes.add(torch.add, head + 1, closes, out=self._head)
            changes.add(torch.logical_not, closes, out=self._open)

    def _check_stacks(
        self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], same: torch.Tensor, reset: torch.Tensor | None,
        changes: Changes,
    ) -> None:  # fmt: skip
        memory = self._memory
        broken = memory.broken
        reset = torch.zeros_like(same) if reset is None else reset
        for place, i in enumerate(memory.observed):
            field = memory.schema.fields[i]
            if not isinstance(field, Stacked):
                continue
            stack, follower = (group.movedim(1 + field.axis, 1) for group in (leaves[i], nexts[place]))
            padding = stack[:, -1:] if field.pad == "repeat" else torch.zeros_like(stack[:, -1:])
            bad = ~(same | reset | _equal_bits(stack[:, :-1], padding.expand_as(stack[:, :-1])))
            bad_next = ~(reset | _equal_bits(follower[:, :-1], stack[:, 1:]))
            if memory.device.type != "cpu":
                broken = broken + (bad | bad_next).sum()
            elif bad.any():
                raise memory.unstackable(i)
            elif bad_next.any():
                raise memory.unstackable(len(memory.leaves) + place)
        if broken is not memory.broken:
            changes.add(memory.broken.copy_, broken)

    def _kept(self, column: int, leaf: torch.Tensor) -> torch.Tensor:
        """What is stored of a leaf: all of it, or the newest frame of a stack."""
        field = self._memory.schema.fields[column]
        return leaf.select(1 + field.axis, field.k - 1) if isinstance(field, Stacked) else leaf


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integers by their size in bytes, or half of it."""


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether rows are the same bytes: NaN equals itself, and 0.0 is not -0.0."""
    dtype = _BITS[a.element_size()]
    # An axis of length one may have any stride, which a view of bits minds: say that memory is in one piece.
    a, b = (x.contiguous().as_strided((x.numel(),), (1,)).view(dtype).view(len(x), -1) for x in (a, b))
    same = a == b
    # Flags as bytes: torch finds the smallest of these several times as fast on the host.
    return same.view(torch.uint8).amin(1).view(torch.bool) if same.numel() else same.all(1)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether a host tensor has finite numbers only."""
    array = numpy_view(tensor)  # numpy's numbers are no launches
    return bool(tensor.isfinite().all() if array is None else np.isfinite(array).all())
