"""What is true of the memory of a replay buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from relive.errors import InvariantError, explain
from relive.fields.conversion import path_name
from relive.fields.invariants import require, require_addresses, require_all, require_flags, require_form
from relive.replay.ring import EMPTY, FINAL, HISTORY, PENDING, TRANSITION, Ring

if TYPE_CHECKING:
    from relive.replay.row_memory import RowMemory
    from relive.replay.store import ReplayStore

_KINDS = ("empty", "transition", "final", "pending", "history")


def check_memory(memory: RowMemory) -> None:
    """The leaves are as they were declared, and the rings in them hold whole transitions of whole episodes."""
    _check_form(memory)
    if not memory.has_values:
        return
    for fault in faults_of(memory):
        raise InvariantError(fault)
    _check_heads(memory)
    rows = _Rows(memory.ring)
    _check_kinds(memory, rows)
    _check_episodes(memory, rows)
    _check_ends(memory, rows)
    _check_counts(memory)


def faults_of(memory: RowMemory) -> Iterator[str]:
    """What a device has stored though it could not be rebuilt: counted there, since raising would have been a wait."""
    broken = int(memory.broken) if memory.has_values else 0
    if broken:
        remedy = "Check k, axis and pad: only stacks that single frames can rebuild are stored."
        yield explain("obs", "stacks of the stored frames", f"{broken} steps with other stacks", remedy)


def _check_form(memory: RowMemory) -> None:
    ring, schema = memory.ring, memory.schema
    num_envs = memory.lead[0] if memory.lead else 1
    alive = memory.rows + (not memory.keeps_next)
    expected = (num_envs, alive, alive + schema.deepest_stack - 1)
    got = (ring.num_envs, ring.alive, ring.slots)
    require(got == expected, "ring", f"(environments, rows, slots) {expected}", got)
    lead, copied = (ring.slots, ring.num_envs), memory.observed if memory.keeps_next else ()
    fields = [*schema.fields, *(schema.fields[i] for i in copied)]
    of_ring = Ring.forms(ring.slots, ring.num_envs)
    paths = [*schema.paths, *(memory.next_paths if copied else ()), *((name,) for name in of_ring)]
    forms = [*(((*lead, *field.shape), field.dtype) for field in fields), *of_ring.values()]
    for path, tensor, (shape, dtype) in zip(paths, memory.tensors, forms, strict=True):
        require_form(path_name(path), tensor, shape, dtype, memory.device)
    require_addresses(paths, memory.tensors, memory.addresses)


def _check_heads(memory: RowMemory) -> None:
    ring = memory.ring
    flags = dict(zip(("terminated", "truncated"), memory.flags(), strict=True))
    for name, tensor in (*flags.items(), ("first", ring.first), ("open", ring.open), ("resetting", ring.resetting)):
        require_flags(name, tensor)
    require_all(ring.floor >= 0, "floor", "a row of at least 0", ring.floor)
    require_all(ring.head >= ring.floor, "head", "a row of at least the floor", ring.head)
    most = torch.iinfo(torch.int64).max // ring.num_envs - 1
    require_all(ring.head <= most, "head", f"a row of at most {most}, for ids of int64", ring.head)
    may_open = (ring.head > ring.floor) & (not memory.keeps_next)
    require_all(may_open | ~ring.open, "open", "False without a step before the row", ring.open)
    may_reset = (ring.open | memory.keeps_next | (ring.head == ring.floor)) & memory.next_step
    expected = "False, except after an end under autoreset=NEXT_STEP"
    require_all(may_reset | ~ring.resetting, "resetting", expected, ring.resetting)


class _Rows:
    """The rows that the slots of a ring are for, and what is known of each by its number [S, N]."""

    def __init__(self, ring: Ring) -> None:
        newest = ring.newest()
        self.row = ring.rows()
        self.kind = ring.kind
        self.is_stored = self.row >= ring.floor
        self.is_first = self.row == ring.floor
        """The first row since the last clear."""
        self.is_newest = self.is_stored & (self.row == newest)
        self.is_alive = self.row > newest - ring.alive
        self.is_step = (ring.kind == TRANSITION) | (ring.kind == HISTORY)
        self.follows = self.row > torch.maximum(ring.floor, newest - ring.slots + 1)
        """The row before is there too."""

    def after(self, what: torch.Tensor) -> torch.Tensor:
        """Which rows come after those that something is true of."""
        return what.roll(1, 0) & self.follows

    def require(self, holds: torch.Tensor, what: str, expected: str, got: torch.Tensor) -> None:
        if holds.all():
            return
        slot, env = (~holds).nonzero()[0].tolist()
        where = f"{what} of row {int(self.row[slot, env])}, environment {env}"
        found = _KINDS[int(got[slot, env])] if what == "kind" else got[slot, env].item()
        remedy = "Call clear(), or load a checkpoint: the memory was changed from outside the buffer."
        raise InvariantError(explain(where, expected, found, remedy))


def _check_kinds(memory: RowMemory, rows: _Rows) -> None:
    """What each slot may hold, by its distance to the head."""
    ring, kind = memory.ring, rows.kind
    require_all(ring.kind < len(_KINDS), "kind", f"one of 0 to {len(_KINDS) - 1}", ring.kind)
    rows.require((kind != EMPTY) | ~rows.is_stored, "kind", "a row that was written", kind)
    require_all((kind == EMPTY) | rows.is_stored, "kind", "0 (empty) where no row was written", kind)
    is_open = rows.is_newest & ring.open
    rows.require((kind == PENDING) | ~is_open, "kind", "pending at the open head", kind)
    rows.require((kind != PENDING) | is_open, "kind", "pending only at an open head", kind)
    rows.require(rows.is_alive | (kind != TRANSITION), "kind", f"no transition {ring.alive} rows before the head", kind)
    # What comes right after rows that are lost may be what other rows are stacks of, and no stack itself.
    may_be_history = ~rows.is_alive | (rows.row < ring.floor + ring.slots - ring.alive)
    rows.require(may_be_history | (kind != HISTORY), "kind", f"no history in the newest {ring.alive} rows", kind)
    if not memory.keeps_next:
        rows.require(~(rows.is_step & rows.is_newest), "kind", "no transition as the newest row", kind)


def _check_episodes(memory: RowMemory, rows: _Rows) -> None:
    """What separates episodes, and which rows start one."""
    kind, first, final = rows.kind, memory.ring.first, rows.kind == FINAL
    after_final = rows.after(final)
    if not memory.next_step:
        rows.require(~(final & (after_final | rows.is_first)), "kind", "a transition before a final row", kind)
    else:
        # A reset and, after it, an observation that nobody acted on.
        twice = final & after_final
        rows.require(~(final & rows.after(twice)), "kind", "at most two final rows in a row", kind)
    if memory.keeps_next:
        rows.require(first | ~rows.is_stored, "first", "a start in every unordered row", first)
    else:
        rows.require(first | ~after_final, "first", "a start after a final row", first)
        rows.require(~first | ~(rows.follows & ~after_final), "first", "a start only after a final row", first)


def _check_ends(memory: RowMemory, rows: _Rows) -> None:
    """Flags are where episodes end, and environments reset where the flags say so."""
    ring, kind = memory.ring, rows.kind
    terminated, truncated = memory.flags()
    ended = rows.is_step & (terminated | truncated)
    after_end = rows.after(ended)
    if memory.keeps_next:
        is_reset = rows.follows & (kind == FINAL)
        rows.require(after_end | ~is_reset, "kind", "an end before the row that resets", kind)
    else:
        closed = (kind == FINAL) | ((kind == PENDING) & memory.next_step)
        rows.require(closed | ~after_end, "kind", "final after an end", kind)
    if not memory.next_step:
        return
    # After an end the coming row resets; what is stored beside its rows shows no cut that has undone that.
    envs = torch.arange(ring.num_envs, device=memory.device)
    stored = ring.head > ring.floor
    led_by_end = stored & ended.view(-1)[ring.at((ring.head - 1).clamp(min=0), envs)]
    require_all(
        led_by_end | ~(ring.resetting & stored),
        "resetting",
        "False, except after an end in the newest row",
        ring.resetting,
    )
    require_all(ring.resetting | ~(led_by_end & ring.open), "resetting", "True after an end", ring.resetting)


def _check_counts(memory: RowMemory) -> None:
    """What is remembered about the kinds agrees with them."""
    ring = memory.ring
    require_all(ring.count == (ring.kind == TRANSITION).sum(0), "count", "the number of transitions", ring.count)
    slots = ring.transitions()
    ids = ring.id_of(slots)
    require_all(ring.locate(ids)[0] == slots, "ids", "ids that map back to their slots", ids)


def check_kernels(store: ReplayStore) -> None:
    """What the kernels of a store say of the rows is what their memory says."""
    ring = store.memory.ring
    slots = ring.transitions()
    require(len(store) == len(slots), "len", f"{len(slots)}, the number of transitions", len(store))
    ids = store.ids(slots)
    require_all(ring.locate(ids)[0] == slots, "ids", "ids that map back to their slots", ids)
