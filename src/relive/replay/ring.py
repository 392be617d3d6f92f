"""Ring buffers of many environments in one memory: each environment's column is a ring with its own head.

Row numbers never repeat: row r of environment e is at slot r mod S of its column, and its id is r·N + e. The flat
number of a slot is slot·N + e. The next observation of a transition is the observation of the following row, so every
observation is stored once. A row that holds only an observation (the end of an episode, or the newest one) separates
episodes.

All modular arithmetic of the library is here and in the native counterpart, `csrc/core/ring.hpp`. Everything here is
torch ops on the ring's device, without synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import pad

from relive.errors import explain
from relive.kernels import complete
from relive.kernels.torch_ops import cached_arange
from relive.schema.invariants import to_host_array
from relive.storage import Allocator
from relive.storage.codec import JsonNode, SnapshotReader

MAX_ROWS_PER_STEP = 4
"""Maximum number of rows per step: a cut pending row, the step itself, the final row, and a row for `cut()`."""

MAX_ID = 2**63 - 1

NO_ID = -(2**63)
"""The id of an empty slot. Not -1, which callers pass as padding."""

_MAX_GATHERED_STEPS = 1024
"""Maximum number of steps that `Ring.count_neighbors` reads per row."""

EMPTY, TRANSITION, FINAL, PENDING, HISTORY = range(5)
"""Kinds of slots. EMPTY: no row. TRANSITION: a row that can be drawn. FINAL: only the last observation of an episode.
PENDING: only the newest observation, from which the next step starts. HISTORY: a transition that is too old to be
drawn and is kept for the frame stacks of newer rows."""

_SLOT_STATE = {"kind": torch.uint8, "first": torch.bool}
_ENV_STATE = {
    "head": torch.int64, "open": torch.bool, "resetting": torch.bool, "count": torch.int64, "floor": torch.int64,
}  # fmt: skip


@dataclass(eq=False)
class Ring:
    """The kinds and heads of `num_envs` columns of slots.

    The tensors of `_SLOT_STATE` and `_ENV_STATE` are the ring's state. Their names and order also define files,
    checkpoints and the native ring.
    """

    num_sampleable: int
    """Number of newest rows per environment that can be drawn."""
    slots: int
    """Number of slots per environment."""
    num_envs: int
    kind: torch.Tensor
    """The kind of every slot [S, N]."""
    first: torch.Tensor
    """Whether the observation of a slot starts an episode [S, N]."""
    head: torch.Tensor
    """Number of the next row [N]."""
    open: torch.Tensor
    """Whether the head row already holds an observation, the `next_obs` of the last step [N]."""
    resetting: torch.Tensor
    """Whether the next step only resets (NEXT_STEP) [N]."""
    count: torch.Tensor
    """Number of transitions [N]."""
    floor: torch.Tensor
    """First valid row [N]: rows before it were cleared or dropped."""
    journal: torch.Tensor | None = None
    """1 + 2 · head + open at the start of an unfinished write, else 0 [N]; see `recover`. Not saved."""

    @staticmethod
    def state_specs(slots: int, num_envs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each state tensor, by name."""
        specs = {name: ((slots, num_envs), dtype) for name, dtype in _SLOT_STATE.items()}
        return specs | {name: ((num_envs,), dtype) for name, dtype in _ENV_STATE.items()}

    @staticmethod
    def allocate(num_sampleable: int, num_envs: int, history: int, allocator: Allocator) -> Ring:
        """Make an empty ring, or reopen the one in the allocator's memory."""
        slots = num_sampleable + history
        specs = Ring.state_specs(slots, num_envs).items()
        state = {name: allocator.allocate(f"ring.{name}", shape, dtype) for name, (shape, dtype) in specs}
        journal = allocator.allocate("ring.journal", (num_envs,), torch.int64) if allocator.persistent else None
        return Ring(num_sampleable, slots, num_envs, **state, journal=journal)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """State tensors by name, in the order of the native ring."""
        return {name: getattr(self, name) for name in (*_SLOT_STATE, *_ENV_STATE)}

    @property
    def size(self) -> int:
        """Number of flat slots."""
        return self.slots * self.num_envs

    @cached_property
    def first_ids(self) -> torch.Tensor:
        """Ids of the rows 0 and 1 of every environment [2, N]; the ids of row 0 are the environment numbers."""
        return torch.arange(2 * self.num_envs, device=self.kind.device).view(2, -1)

    def pending_slots(self) -> torch.Tensor:
        """Return the flat slots [N] of the head rows, which hold the newest observations of open episodes."""
        return self.flat_slots(self.head, self.first_ids[0])

    def transition_slots(self) -> torch.Tensor:
        return (self.kind.view(-1) == TRANSITION).nonzero().squeeze(1)

    def flat_slots(self, rows: torch.Tensor, envs: torch.Tensor) -> torch.Tensor:
        """Return the flat slots of the rows with the numbers `rows` in the environments `envs`."""
        return rows % self.slots * self.num_envs + envs

    def newest_rows(self) -> torch.Tensor:
        """Return the newest written row of each environment [N]."""
        return self.head - (~self.open).long()

    def row_numbers(self) -> torch.Tensor:
        """Return the row number of every slot [S, N]."""
        newest = self.newest_rows()
        slot, newest_slot = torch.arange(self.slots, device=newest.device).unsqueeze(1), newest % self.slots
        row_at_slot_0 = newest - newest_slot
        return slot + torch.where(slot > newest_slot, row_at_slot_0 - self.slots, row_at_slot_0)

    def ids(self) -> torch.Tensor:
        """Return the id of every flat slot's transition [S·N]; `NO_ID` for a slot without a transition."""
        ids = torch.add(self.first_ids[0], self.row_numbers(), alpha=self.num_envs)
        return torch.where(self.kind == TRANSITION, ids, NO_ID).view(-1)

    def ids_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the ids of the rows at flat slots; each slot holds the newest row that maps to it."""
        next_ids = torch.add(self.first_ids[0], self.head + self.open, alpha=self.num_envs)
        newest_ids = next_ids[slots % self.num_envs] - self.num_envs
        return newest_ids - (newest_ids - slots) % self.size

    def shift(self, slots: torch.Tensor, steps: int | torch.Tensor = 1) -> torch.Tensor:
        """Return the flat slots of the rows `steps` later."""
        return (slots + steps * self.num_envs) % self.size

    def kind_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the kind of the row at each flat slot: EMPTY, TRANSITION, FINAL, PENDING or HISTORY."""
        return self.kind.view(-1)[slots]

    def is_drawable(self, slots: torch.Tensor) -> torch.Tensor:
        """Return a mask of the ints that are flat slots of transitions; the ints may be out of range."""
        valid_slots = slots.clamp(0, self.kind.numel() - 1)
        return (slots == valid_slots) & (self.kind_at(valid_slots) == TRANSITION)

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flat slots of row ids (-1 for rows that cannot be drawn), and a mask of ids never issued."""
        env = ids % self.num_envs
        row = ids.div(self.num_envs, rounding_mode="floor")
        slots = self.flat_slots(row.clamp(min=0), env)
        is_recent = row > self.newest_rows()[env] - self.num_sampleable
        kind = self.kind_at(slots)
        is_unissued = (ids < 0) | (row >= self.head[env]) | (is_recent & (kind == FINAL))
        return torch.where(is_recent & (kind == TRANSITION) & ~is_unissued, slots, -1), is_unissued

    def count_following(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the number of transitions of the same episode after each slot."""
        # The ring is repeated, because an episode may continue from the last slot in the first slot.
        stops = torch.cat([self.kind, self.kind]) != TRANSITION
        return self._count_steps_to_stop(stops.flip(0), 2 * self.slots - 1 - slots // self.num_envs, slots) - 1

    def count_preceding(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the number of transitions of the same episode before each slot."""
        # Counting back stops at a row that starts its episode, or whose preceding row is no transition any more.
        stops = self.first | (self.kind.roll(1, 0) != TRANSITION)
        return self._count_steps_to_stop(torch.cat([stops, stops]), self.slots + slots // self.num_envs, slots)

    def count_neighbors(self, slots: torch.Tensor, before: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count_preceding` and `count_following`, limited to `before` and `after` steps.

        Both limits are below the number of slots.
        """
        # For many steps, a pass over all slots is faster than reading the nearby slots of each row.
        if before + after > _MAX_GATHERED_STEPS:
            return self.count_preceding(slots).clamp(max=before), self.count_following(slots).clamp(max=after)
        # A row that is not a transition always separates two episodes, so counting stops at this row.
        nearby_slots = self.shift(slots.unsqueeze(1), torch.arange(-before, after + 1, device=slots.device))
        is_step = self.kind_at(nearby_slots) == TRANSITION
        return is_step[:, :before].flip(1).cumprod(1).sum(1), is_step[:, before + 1 :].cumprod(1).sum(1)

    def _count_steps_to_stop(self, is_stop: torch.Tensor, place: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the distance from index `place` of `is_stop` back to the nearest stop, in the column of each slot."""
        places = torch.arange(len(is_stop), device=slots.device).unsqueeze(1)
        last_stop = torch.where(is_stop, places, -1).cummax(0).values
        return place - last_stop[place, slots % self.num_envs]

    def following_slots(self, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flat slots [count + 1, B] of the rows `ids` and of the `count` rows after each.

        Also return a mask [count, B] of the rows that are not transitions, without the last row of each column.
        """
        offsets = cached_arange(0, (count + 1) * self.num_envs, self.num_envs, ids.device).unsqueeze(1)
        slots = (ids + offsets) % self.size
        return slots, self.kind_at(slots[:-1]) != TRANSITION

    def sequence_slots(self, ids: torch.Tensor, before: int, after: int, crosses_episodes: bool) -> torch.Tensor:
        """Return the flat slots [B, before + after] of packed sequences, which end with padding of -1.

        A sequence has up to `before` steps before its row, the row, and up to `after` - 1 steps after its row. With
        `crosses_episodes`, a sequence continues in the next episode.
        """
        if not before and not crosses_episodes:
            slots, is_no_step = self.following_slots(ids, min(after, self.slots))
            steps = slots[:-1].masked_fill_(is_no_step.cummax(0).values, -1).t()
            return pad(steps, (0, after - self.slots), value=-1) if after > self.slots else steps.contiguous()
        # At most two rows (a reset and a cut) separate episodes, so transitions are at most three rows apart.
        row_spacing = 3 if crosses_episodes else 1
        rows_before, rows_after = (min(row_spacing * steps, self.slots - 1) for steps in (before, after - 1))
        offsets = cached_arange(-rows_before * self.num_envs, rows_after * self.num_envs + 1, self.num_envs, ids.device)
        nearby_ids = ids.unsqueeze(1) + offsets
        nearby_slots = nearby_ids % self.size
        is_step = self.kind_at(nearby_slots) == TRANSITION
        if crosses_episodes:
            next_id = torch.add(self.first_ids[0], self.head, alpha=self.num_envs)[ids % self.num_envs].unsqueeze(1)
            is_step &= (nearby_ids < next_id) & (nearby_ids >= next_id - self.size)
        else:
            episode = (self.first.view(-1)[nearby_slots] >= is_step).cumsum(1)
            is_step &= episode == episode[:, rows_before : rows_before + 1]
        number = is_step.cumsum(1)
        own_number = number[:, rows_before : rows_before + 1]
        place = number - (own_number - before).clamp(min=1)
        is_step &= (place >= 0) & (number < own_number + after)
        padding_position = before + after
        windows = torch.full((len(ids), padding_position + 1), -1, device=ids.device)
        return windows.scatter_(1, torch.where(is_step, place, padding_position), nearby_slots)[:, :-1]

    def recover(self) -> None:
        """Restore a valid ring after a process died while it held the lock.

        An unfinished step is discarded: its episode ends before it, and the oldest rows, which it may have overwritten,
        are dropped. Rows before a missing row are dropped too: the process died during `clear`.
        """
        assert self.journal is not None
        old_state = (self.journal - 1).clamp(min=0)
        is_torn = self.journal > 0
        old_head, was_open = torch.where(is_torn, old_state // 2, self.head), is_torn & (old_state % 2 > 0)
        self.roll_back(old_head, was_open, is_torn, MAX_ROWS_PER_STEP)
        self.journal.zero_()

    def roll_back(self, head: torch.Tensor, was_open: torch.Tensor, mask: torch.Tensor, max_new_rows: int) -> None:
        """Roll the environments where `mask` [N] is True back to earlier heads [N].

        Up to `max_new_rows` rows per environment may have been written since, over the oldest rows, which are dropped.
        """
        kind = self.kind.view(-1)
        pending = self.flat_slots(head, self.first_ids[0])
        kind[pending] = torch.where(was_open & mask, FINAL, kind[pending]).to(torch.uint8)
        self.head.copy_(torch.where(mask, head + was_open.long(), self.head))
        self.open &= ~mask
        self.resetting &= ~mask
        self.drop_rows_before(torch.where(mask, self.head + max_new_rows - self.slots, 0))

    def drop_rows_before(self, first_kept_rows: torch.Tensor) -> None:
        """Drop rows before `first_kept_rows` [N] or before a missing row, and final rows that follow no transition."""
        row, kind = self.row_numbers(), self.kind
        is_missing = (kind == EMPTY) & (row >= torch.maximum(self.floor, first_kept_rows))
        first_kept_rows = torch.maximum(first_kept_rows, torch.where(is_missing, row + 1, 0).amax(0))
        loses_rows = first_kept_rows > self.floor
        row_after_newest = self.newest_rows() + 1
        first_rows = torch.where((row >= first_kept_rows) & (kind != FINAL), row, row_after_newest).amin(0)
        self.floor.copy_(torch.where(loses_rows, torch.minimum(first_rows, self.head), self.floor))
        # The first remaining rows may need frames of dropped rows, so these remaining rows become history.
        lacks_frames = loses_rows & (row < self.floor + self.slots - self.num_sampleable) & (kind == TRANSITION)
        kind.copy_(torch.where(row < self.floor, EMPTY, torch.where(lacks_frames, HISTORY, kind)).to(torch.uint8))
        self.open &= self.head > self.floor
        kind.copy_(torch.where((row >= self.head) & ~self.open, EMPTY, kind).to(torch.uint8))
        self.count.copy_((kind == TRANSITION).sum(0))

    def exclude_rows(self, is_torn: torch.Tensor) -> None:
        """Exclude the rows in a mask [slots, N] from draws; they stay as the next observations of other rows."""
        self.kind.copy_(torch.where(is_torn & (self.kind == TRANSITION), HISTORY, self.kind).to(torch.uint8))
        self.count.copy_((self.kind == TRANSITION).sum(0))

    def end_episodes(self, envs: torch.Tensor | None = None, on_complete: Callable[[], None] | None = None) -> None:
        """End the open episodes of these environments, or of all, with the newest observation.

        `on_complete` is called after the cut, even if a signal interrupts the cut (see `kernels.complete`).
        """
        env = self.first_ids[0] if envs is None else envs
        kind, head, is_open = self.kind.view(-1), self.head[env], self.open[env]
        pending, next_head = self.flat_slots(head, env), head + is_open.long()
        final_kind = torch.where(is_open, FINAL, kind[pending]).to(torch.uint8)

        def change() -> None:
            if self.journal is not None:
                self.journal[env] = 1 + 2 * head + is_open
            kind[pending] = final_kind
            self.head[env] = next_head
            self.open[env] = False
            self.resetting[env] = False
            if self.journal is not None:
                self.journal[env] = 0
            if on_complete is not None:
                on_complete()

        complete(change)

    def num_rows_left(self) -> int:
        """Return the minimum number of rows per environment until ids exceed int64. Synchronises."""
        return MAX_ID // self.num_envs - int(self.head.max())

    def require_rows_left(self, num_steps: int) -> int:
        """Return `num_rows_left`; raises if the ids do not suffice for `num_steps` steps."""
        rows_left = self.num_rows_left()
        if rows_left < MAX_ROWS_PER_STEP * num_steps:
            got = f"room for {rows_left} rows per environment"
            raise OverflowError(explain("add", "ids below 2^63", got, "Make a new buffer."))
        return rows_left

    def clear(self) -> None:
        """Delete every row; ids and pending resets continue."""
        self.kind.zero_()
        self.count.zero_()
        self.floor.copy_(self.head)
        self.open.zero_()

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore the state of a ring of the same size."""
        for name, (shape, dtype) in Ring.state_specs(self.slots, self.num_envs).items():
            saved.require_array(name, shape, dtype)
        check_ring(*(saved.read_verified(name) for name in ("kind", "head", "count", "floor")))
        saved.copy_arrays_into(self.state)


def check_ring(kind: torch.Tensor, head: torch.Tensor, count: torch.Tensor, floor: torch.Tensor) -> None:
    """Verify the state of a ring from a file: a wrong kind or row number could address memory outside the ring."""
    host_kind, host_head, host_count, host_floor = map(to_host_array, (kind, head, count, floor))
    max_row = (1 << 62) // (2 * len(host_head))
    num_transitions = np.count_nonzero(host_kind == TRANSITION, axis=0)
    for name, is_valid, got, expected in (
        ("kind", host_kind <= HISTORY, host_kind, f"a kind of 0 to {HISTORY}"),
        ("head", (host_head >= 0) & (host_head < max_row), host_head, f"a row of 0 to {max_row}"),
        ("floor", (host_floor >= 0) & (host_floor <= host_head), host_floor, "a row of 0 to the head"),
        ("count", host_count == num_transitions, host_count, "the number of transitions"),
    ):
        if not bool(is_valid.all()):
            place = np.argwhere(~is_valid)[0].tolist()
            raise JsonNode(f"state: ring.{name}{place}", got[tuple(place)].item()).error(expected)


class HostRing:
    """A ring of one column whose head is a Python int: the newest `capacity` rows, row r at slot r mod `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.head = 0
        """Number of the next row."""
        self.floor = 0
        """First row since the last clear."""

    @property
    def oldest_row(self) -> int:
        """Number of the oldest stored row."""
        return max(self.floor, self.head - self.capacity)

    def __len__(self) -> int:
        return self.head - self.oldest_row

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        return rows % self.capacity

    def find_next_slices(self, count: int) -> list[tuple[slice, slice]]:
        """Return slices (rows, slots) for the next `count` rows; only their last `capacity` rows are stored."""
        if self.head + count > MAX_ID:
            raise OverflowError(explain("add", "ids below 2^63", f"{self.head + count} rows", "Make a new buffer."))
        start = max(count - self.capacity, 0)
        slot = (self.head + start) % self.capacity
        ring_end = min(start + self.capacity - slot, count)
        pieces = [
            (slice(start, ring_end), slice(slot, slot + ring_end - start)),
            (slice(ring_end, count), slice(0, count - ring_end)),
        ]
        return [(rows, slots) for rows, slots in pieces if rows.stop > rows.start]

    def clear(self) -> None:
        """Delete every row; row numbers continue."""
        self.floor = self.head
