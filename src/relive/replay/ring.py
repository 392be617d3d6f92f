"""Rows of many environments in one memory: each environment's column is a ring with its own head.

Rows are numbered for ever: row r of environment e is at slot r mod S of its column, and its id is r·N + e. A slot's
flat number is slot·N + e. A transition's next observation is the observation of the row after it, so that every
observation is stored once; a row that holds only an observation (where an episode ended, or the newest one) separates
episodes.

All modular arithmetic of the library is here and in its native twin, `csrc/core/ring.hpp`. Everything is torch ops on
the ring's device, without a host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from relive.checkpoint.snapshot import SnapshotReader
from relive.errors import explain
from relive.kernels import complete
from relive.kernels.constants import count_from
from relive.schema.invariants import on_host
from relive.storage import Allocator
from relive.storage.codec import Node

MAX_ROWS_PER_STEP = 4
"""Rows that a step can use: the pending row that was cut, its own, the final one, and that of `cut()`."""

MAX_ID = 2**63 - 1

NO_ID = -(2**63)
"""The id of no row: nobody asks for it, while -1 names no step of a sequence."""

_MANY_STEPS = 1024

EMPTY, TRANSITION, FINAL, PENDING, HISTORY = range(5)
"""The kinds of slots: nothing; a row that may be drawn; only the observation that an episode ended with; only the
newest observation, waiting for the step that starts there; a row too old to be drawn, kept for the stacks of younger
ones."""


def _of_slots(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "of_slots": True}


def _of_envs(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "of_slots": False}


@dataclass(eq=False)
class Ring:
    """`num_envs` columns of slots, the newest `num_sampleable` rows of which may be drawn.

    The state of a ring is the fields below, in their order: names, files, checkpoints and the native twin derive it.
    """

    num_sampleable: int
    slots: int
    num_envs: int
    kind: torch.Tensor = field(metadata=_of_slots(torch.uint8))
    """The kind of every slot."""
    first: torch.Tensor = field(metadata=_of_slots(torch.bool))
    """This observation starts an episode."""
    head: torch.Tensor = field(metadata=_of_envs(torch.int64))
    """The row that is written next."""
    open: torch.Tensor = field(metadata=_of_envs(torch.bool))
    """The head row's observation is there already: the last step led to it."""
    resetting: torch.Tensor = field(metadata=_of_envs(torch.bool))
    """The coming row only resets (NEXT_STEP)."""
    count: torch.Tensor = field(metadata=_of_envs(torch.int64))
    """How many rows may be drawn."""
    floor: torch.Tensor = field(metadata=_of_envs(torch.int64))
    """The first row since the last clear, or since older ones were lost."""
    journal: torch.Tensor | None = None
    """The start of a step that is being written, 1 + 2 · head + open, else 0; see `recover`. Not saved."""

    @staticmethod
    def forms(slots: int, num_envs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor of the state, by name."""
        return {
            each.name: ((slots, num_envs) if each.metadata["of_slots"] else (num_envs,), each.metadata["dtype"])
            for each in fields(Ring)
            if each.metadata
        }

    @staticmethod
    def allocated(num_sampleable: int, num_envs: int, history: int, allocator: Allocator) -> Ring:
        """An empty ring, or the one that was left there."""
        slots = num_sampleable + history
        forms = Ring.forms(slots, num_envs).items()
        state = {name: allocator.allocate(f"ring.{name}", shape, dtype) for name, (shape, dtype) in forms}
        journal = allocator.allocate("ring.journal", (num_envs,), torch.int64) if allocator.persistent else None
        return Ring(num_sampleable, slots, num_envs, **state, journal=journal)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Everything that changes, by name; its order is the native twin's too."""
        return {name: getattr(self, name) for name in _STATE}

    @property
    def size(self) -> int:
        """How many slots there are in all."""
        return self.slots * self.num_envs

    @cached_property
    def first_ids(self) -> torch.Tensor:
        """The ids of the rows 0 and 1 of every environment [2, N]; the first ones are the environments."""
        return torch.arange(2 * self.num_envs, device=self.kind.device).view(2, -1)

    def pending(self) -> torch.Tensor:
        """The flat slots [N] that the next rows are written to; they hold the newest observations where open."""
        return self.at(self.head, self.first_ids[0])

    def transitions(self) -> torch.Tensor:
        """The flat slots of all rows that may be drawn."""
        return (self.kind.view(-1) == TRANSITION).nonzero().squeeze(1)

    def at(self, row: torch.Tensor, env: torch.Tensor) -> torch.Tensor:
        """The flat slots of rows."""
        return row % self.slots * self.num_envs + env

    def newest(self) -> torch.Tensor:
        """Each environment's newest row that holds anything [N]."""
        return self.head - (~self.open).long()

    def rows(self) -> torch.Tensor:
        """`row_of` all slots [S, N]."""
        top = self.newest()
        slot, place = torch.arange(self.slots, device=top.device).unsqueeze(1), top % self.slots
        return slot + torch.where(slot > place, top - place - self.slots, top - place)

    def ids(self) -> torch.Tensor:
        """The identities of the transitions at all flat slots [S·N], `NO_ID` where there is none."""
        ids = torch.add(self.first_ids[0], self.rows(), alpha=self.num_envs)
        return torch.where(self.kind == TRANSITION, ids, NO_ID).view(-1)

    def id_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The identities of the rows that flat slots hold: the newest that fall there."""
        beyond = torch.add(self.first_ids[0], self.head + self.open, alpha=self.num_envs)  # the next row's
        top = beyond[slots % self.num_envs] - self.num_envs
        return top - (top - slots) % self.size

    def after(self, slots: torch.Tensor, steps: int | torch.Tensor = 1) -> torch.Tensor:
        """The flat slots of the rows `steps` later."""
        return (slots + steps * self.num_envs) % self.size

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """The flat slots of the preceding rows."""
        return self.after(slots, -1)

    def kind_at(self, slots: torch.Tensor) -> torch.Tensor:
        """The kinds of flat slots."""
        return self.kind.view(-1)[slots]

    def is_drawable(self, slots: torch.Tensor) -> torch.Tensor:
        """Whether numbers are flat slots of transitions."""
        inside = slots.clamp(0, self.kind.numel() - 1)
        return (slots == inside) & (self.kind_at(inside) == TRANSITION)

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat slots of row ids (-1 for rows that can no longer be drawn), and which ids were never issued."""
        env = ids % self.num_envs
        row = ids.div(self.num_envs, rounding_mode="floor")
        slots = self.at(row.clamp(min=0), env)
        inside = row > self.newest()[env] - self.num_sampleable
        kind = self.kind_at(slots)
        never = (ids < 0) | (row >= self.head[env]) | (inside & (kind == FINAL))
        return torch.where(inside & (kind == TRANSITION) & ~never, slots, -1), never

    def ahead(self, slots: torch.Tensor) -> torch.Tensor:
        """How many more transitions of the same episode follow each slot."""
        stops = torch.cat([self.kind, self.kind]) != TRANSITION  # twice around: no run is broken by the seam
        return self._since(stops.flip(0), 2 * self.slots - 1 - slots // self.num_envs, slots) - 1

    def preceding(self, slots: torch.Tensor) -> torch.Tensor:
        """How many transitions of the same episode precede each slot."""
        # A row starts its run when it starts its episode, or when the row before it is no transition any more.
        stops = self.first | (self.kind.roll(1, 0) != TRANSITION)
        return self._since(torch.cat([stops, stops]), self.slots + slots // self.num_envs, slots)

    def reach(self, slots: torch.Tensor, before: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`preceding` and `ahead`, as far as they do not exceed `before` and `after`, which are less than all slots."""
        if before + after > _MANY_STEPS:  # looking at every slot once is less work
            return self.preceding(slots).clamp(max=before), self.ahead(slots).clamp(max=after)
        # Between two episodes there is always a row that is no transition.
        at = self.after(slots.unsqueeze(1), torch.arange(-before, after + 1, device=slots.device))
        is_step = self.kind_at(at) == TRANSITION
        return is_step[:, :before].flip(1).cumprod(1).sum(1), is_step[:, before + 1 :].cumprod(1).sum(1)

    def _since(self, stops: torch.Tensor, place: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """How far back the last stop lies from each place."""
        places = torch.arange(len(stops), device=slots.device).unsqueeze(1)
        last = torch.where(stops, places, -1).cummax(0).values
        return place - last[place, slots % self.num_envs]

    def run(self, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat slots of rows and of the `count` rows after each [count + 1, B]; which of all but the last are no
        transitions [count, B]."""
        offsets = count_from(0, (count + 1) * self.num_envs, self.num_envs, ids.device).unsqueeze(1)
        run = (ids + offsets) % self.size
        return run, self.kind_at(run[:-1]) != TRANSITION

    def windows(self, ids: torch.Tensor, before: int, after: int, cross: bool) -> torch.Tensor:
        """Flat slots [B, before + after]: up to `before` steps before each row, itself, steps after it, then -1."""
        if not before and not cross:
            run, is_no_step = self.run(ids, min(after, self.slots))
            found = run[:-1].masked_fill_(is_no_step.cummax(0).values, -1).t()
            return pad(found, (0, after - self.slots), value=-1) if after > self.slots else found.contiguous()
        apart = 3 if cross else 1  # at most two rows between episodes are no steps: a reset and a cut
        back, ahead = (min(apart * steps, self.slots - 1) for steps in (before, after - 1))
        offsets = count_from(-back * self.num_envs, ahead * self.num_envs + 1, self.num_envs, ids.device)
        near = ids.unsqueeze(1) + offsets
        at = near % self.size
        is_step = self.kind_at(at) == TRANSITION
        if cross:
            coming = torch.add(self.first_ids[0], self.head, alpha=self.num_envs)[ids % self.num_envs].unsqueeze(1)
            is_step &= (near < coming) & (near >= coming - self.size)
        else:
            episode = (self.first.view(-1)[at] >= is_step).cumsum(1)
            is_step &= episode == episode[:, back : back + 1]
        number = is_step.cumsum(1)
        own = number[:, back : back + 1]
        place = number - (own - before).clamp(min=1)
        is_step &= (place >= 0) & (number < own + after)
        nowhere = before + after
        found = torch.full((len(ids), nowhere + 1), -1, device=ids.device)
        return found.scatter_(1, torch.where(is_step, place, nowhere), at)[:, :-1]

    def recover(self) -> None:
        """Make a ring of what a process left that died while it had the lock.

        A step that it was writing has not been: the episode ends where it began, and the oldest rows, which it may have
        overwritten, are lost. So is what lies before a row that is missing: somebody was clearing the buffer.
        """
        assert self.journal is not None
        before = (self.journal - 1).clamp(min=0)
        torn = self.journal > 0
        self.roll_back(torch.where(torn, before // 2, self.head), torn & (before % 2 > 0), torn, MAX_ROWS_PER_STEP)
        self.journal.zero_()

    def roll_back(self, head: torch.Tensor, was_open: torch.Tensor, where: torch.Tensor, reach: int) -> None:
        """Cut the episodes of the environments `where` at earlier heads [N], before up to `reach` rows were written."""
        kind = self.kind.view(-1)
        pending = self.at(head, self.first_ids[0])
        kind[pending] = torch.where(was_open & where, FINAL, kind[pending]).to(torch.uint8)
        self.head.copy_(torch.where(where, head + was_open.long(), self.head))
        self.open &= ~where
        self.resetting &= ~where
        self.drop_before(torch.where(where, self.head + reach - self.slots, 0))

    def drop_before(self, below: torch.Tensor) -> None:
        """Forget the rows below these [N], those before a row that is missing, and ends that nothing led to."""
        row, kind = self.rows(), self.kind
        missing = (kind == EMPTY) & (row >= torch.maximum(self.floor, below))
        below = torch.maximum(below, torch.where(missing, row + 1, 0).amax(0))
        lost = below > self.floor
        nothing = self.newest() + 1
        begins = torch.where((row >= below) & (kind != FINAL), row, nothing).amin(0)
        self.floor.copy_(torch.where(lost, torch.minimum(begins, self.head), self.floor))
        # The frames of the first rows that are left may have been in those that are lost.
        unsafe = lost & (row < self.floor + self.slots - self.num_sampleable) & (kind == TRANSITION)
        kind.copy_(torch.where(row < self.floor, EMPTY, torch.where(unsafe, HISTORY, kind)).to(torch.uint8))
        self.open &= self.head > self.floor
        kind.copy_(torch.where((row >= self.head) & ~self.open, EMPTY, kind).to(torch.uint8))
        self.count.copy_((kind == TRANSITION).sum(0))

    def exclude(self, torn: torch.Tensor) -> None:
        """Never again draw the rows at these slots [S, N]. They keep their places: others lead to them."""
        self.kind.copy_(torch.where(torn & (self.kind == TRANSITION), HISTORY, self.kind).to(torch.uint8))
        self.count.copy_((self.kind == TRANSITION).sum(0))

    def cut(self, envs: torch.Tensor | None = None, then: Callable[[], None] | None = None) -> None:
        """End the open episodes of these environments, or of all, with the newest observation.

        `then` is the rest of the change: see `kernels.complete`.
        """
        env = self.first_ids[0] if envs is None else envs
        kind, head, is_open = self.kind.view(-1), self.head[env], self.open[env]
        pending, after = self.at(head, env), head + is_open.long()
        ended = torch.where(is_open, FINAL, kind[pending]).to(torch.uint8)

        def change() -> None:
            if self.journal is not None:
                self.journal[env] = 1 + 2 * head + is_open
            kind[pending] = ended
            self.head[env] = after
            self.open[env] = False
            self.resetting[env] = False
            if self.journal is not None:
                self.journal[env] = 0
            if then is not None:
                then()

        complete(change)

    def rows_left(self) -> int:
        """How many more rows an environment can be given, at least, whose ids are below 2^63; waits."""
        return MAX_ID // self.num_envs - int(self.head.max())

    def require_rows_left(self, steps: int) -> int:
        """`rows_left`, if they are enough for so many steps."""
        left = self.rows_left()
        if left < MAX_ROWS_PER_STEP * steps:
            got = f"room for {left} rows per environment"
            raise OverflowError(explain("add", "ids below 2^63", got, "Make a new buffer."))
        return left

    def clear(self) -> None:
        """Forget every row; ids go on from where they are, and environments about to reset still are."""
        self.kind.zero_()
        self.count.zero_()
        self.floor.copy_(self.head)
        self.open.zero_()


_STATE = tuple(Ring.forms(0, 0))


class HostRing:
    """One column whose head the host knows: the newest `capacity` rows, row r at slot r mod `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.head = 0
        """The row that is written next."""
        self.floor = 0
        """The first row since the last clear."""

    @property
    def oldest(self) -> int:
        """The first row that is stored."""
        return max(self.floor, self.head - self.capacity)

    def __len__(self) -> int:
        """How many rows are stored."""
        return self.head - self.oldest

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """The slots of rows."""
        return rows % self.capacity

    def coming(self, count: int) -> list[tuple[slice, slice]]:
        """The places of the next `count` rows: pieces of them and their slots; the last ones where not all fit."""
        if self.head + count > 2**63 - 1:
            raise OverflowError(explain("add", "ids below 2^63", f"{self.head + count} rows", "Make a new buffer."))
        start = max(count - self.capacity, 0)
        slot = (self.head + start) % self.capacity
        seam = min(start + self.capacity - slot, count)
        pieces = [(slice(start, seam), slice(slot, slot + seam - start)), (slice(seam, count), slice(0, count - seam))]
        return [(rows, slots) for rows, slots in pieces if rows.stop > rows.start]

    def clear(self) -> None:
        """Forget every row; rows are numbered on from where they are."""
        self.floor = self.head


def load_ring(ring: Ring, saved: SnapshotReader) -> None:
    """Restore a ring of the same size."""
    for name, (shape, dtype) in Ring.forms(ring.slots, ring.num_envs).items():
        saved.require_form(name, shape, dtype)
    check_ring(*(saved.tensor(name) for name in ("kind", "head", "count", "floor")))
    saved.copy_into(ring.state)


def check_ring(*state: torch.Tensor) -> None:
    """Kind, head, count and floor, which everything else is computed from: a wrong one would lead out of the memory."""
    kind, head, count, floor = map(on_host, state)
    most = (1 << 62) // (2 * len(head))
    for name, right, found, expected in (
        ("kind", kind <= HISTORY, kind, f"a kind of 0 to {HISTORY}"),
        ("head", (head >= 0) & (head < most), head, f"a row of 0 to {most}"),
        ("floor", (floor >= 0) & (floor <= head), floor, "a row of 0 to the head"),
        ("count", count == np.count_nonzero(kind == TRANSITION, axis=0), count, "the number of transitions"),
    ):
        if not bool(right.all()):
            place = np.argwhere(~right)[0].tolist()
            raise Node(f"state: ring.{name}{place}", found[tuple(place)].item()).error(expected)
