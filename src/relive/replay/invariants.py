"""What is true of the rings that a replay buffer is stored in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relive.errors import InvariantError, explain
from relive.fields.conversion import dotted
from relive.fields.invariants import require, require_addresses, require_all, require_flags, require_form
from relive.fields.schema import given_shape
from relive.replay.ring import EMPTY, FINAL, HISTORY, PENDING, TRANSITION, Ring
from relive.replay.storage import ReplayStorage

_KINDS = ("empty", "transition", "final", "pending", "history")
_STATE = {
    "kind": torch.uint8, "first": torch.bool, "head": torch.int64, "open": torch.bool, "resetting": torch.bool,
    "count": torch.int64, "floor": torch.int64,
}  # fmt: skip


def check_storage(storage: ReplayStorage, capacity: int) -> None:
    """The columns are as they were declared, and the rings in them hold whole transitions of whole episodes."""
    _check_form(storage, capacity)
    if storage.device.type == "meta":  # which has no values to look at
        return
    remedy = "Check k, axis and pad: only stacks that single frames can rebuild are stored."
    broken = int(storage.broken)
    require(not broken, "obs", "stacks of the stored frames", f"{broken} steps with other stacks", remedy)
    _check_heads(storage)
    rows = _Rows(storage.ring)
    _check_kinds(storage, rows)
    _check_episodes(storage, rows)
    _check_ends(storage, rows)
    _check_counts(storage)


def check_staged(storage: ReplayStorage, staged: Mapping[str, tuple[torch.Tensor, ...]]) -> None:
    """What waits for the rest of its step is what the schema declares."""
    schema = storage.schema
    for name, leaves in staged.items():
        require(name in schema.names, "staged fields", f"declared fields ({', '.join(schema.names)})", name)
        for i, leaf in zip(schema.columns[name], leaves, strict=True):
            shape = (*storage.lead, *given_shape(schema.fields[i]))
            require_form(f"staged {dotted(schema.paths[i])}", leaf, shape, schema.fields[i].dtype, storage.device)


def check_seals(storage: ReplayStorage) -> None:
    """Every row on the disk is what was written there."""
    if storage.seals is None:
        return
    broken = storage.broken_rows(torch.zeros_like(storage.ring.head), storage.ring.head + 1)
    if broken.any():
        slot, env = broken.nonzero()[0].tolist()
        where = f"row {int(storage.ring.rows()[slot, env])}, environment {env} (slot {slot})"
        remedy = "Call clear(), or load a checkpoint: the disk has changed the row."
        got = f"other bytes (in {int(broken.sum())} rows)"
        raise InvariantError(explain(where, "the bytes that were written", got, remedy))


def _check_form(storage: ReplayStorage, capacity: int) -> None:
    ring, schema = storage.ring, storage.schema
    num_envs = storage.lead[0] if storage.lead else 1
    alive = capacity // num_envs + (not storage.keeps_next)
    expected = (num_envs, alive, alive + schema.deepest_stack - 1)
    got = (ring.num_envs, ring.alive, ring.slots)
    require(got == expected, "ring", f"(environments, rows, slots) {expected}", got)
    lead, copied = (ring.slots, ring.num_envs), storage.observed if storage.keeps_next else ()
    fields = [*schema.fields, *(schema.fields[i] for i in copied)]
    paths = [*schema.paths, *(storage.next_paths if copied else ()), *((name,) for name in _STATE)]
    forms = [((*lead, *field.shape), field.dtype) for field in fields]
    forms += [(lead if name in ("kind", "first") else lead[1:], dtype) for name, dtype in _STATE.items()]
    for path, tensor, (shape, dtype) in zip(paths, storage.tensors, forms, strict=True):
        require_form(dotted(path), tensor, shape, dtype, storage.device)
    require_addresses(paths, storage.tensors, storage.addresses)


def _check_heads(storage: ReplayStorage) -> None:
    ring = storage.ring
    flags = {name: storage.columns[storage.schema.columns[name][0]] for name in ("terminated", "truncated")}
    for name, tensor in (*flags.items(), ("first", ring.first), ("open", ring.open), ("resetting", ring.resetting)):
        require_flags(name, tensor)
    require_all(ring.floor >= 0, "floor", "a row of at least 0", ring.floor)
    require_all(ring.head >= ring.floor, "head", "a row of at least the floor", ring.head)
    most = torch.iinfo(torch.int64).max // ring.num_envs - 1
    require_all(ring.head <= most, "head", f"a row of at most {most}, for ids of int64", ring.head)
    may_open = (ring.head > ring.floor) & (not storage.keeps_next)
    require_all(may_open | ~ring.open, "open", "False without a step before the row", ring.open)
    may_reset = (ring.open | storage.keeps_next | (ring.head == ring.floor)) & storage.next_step
    expected = "False, except after an end under autoreset=NEXT_STEP"
    require_all(may_reset | ~ring.resetting, "resetting", expected, ring.resetting)
    written = bool((ring.head > ring.floor).any())
    # What other processes wrote this one was not told.
    told = storage.room.outlives or storage.is_empty != written
    require(told, "is_empty", f"{not written}, as the heads show", storage.is_empty)


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


def _check_kinds(storage: ReplayStorage, rows: _Rows) -> None:
    """What each slot may hold, by its distance to the head."""
    ring, kind = storage.ring, rows.kind
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
    if not storage.keeps_next:
        rows.require(~(rows.is_step & rows.is_newest), "kind", "no transition as the newest row", kind)


def _check_episodes(storage: ReplayStorage, rows: _Rows) -> None:
    """What separates episodes, and which rows start one."""
    kind, first, final = rows.kind, storage.ring.first, rows.kind == FINAL
    after_final = rows.after(final)
    if not storage.next_step:
        rows.require(~(final & (after_final | rows.is_first)), "kind", "a transition before a final row", kind)
    else:
        # A reset and, behind it, an observation that nobody acted on.
        twice = final & after_final
        rows.require(~(final & rows.after(twice)), "kind", "at most two final rows in a row", kind)
    if storage.keeps_next:
        rows.require(first | ~rows.is_stored, "first", "a start in every unordered row", first)
    else:
        rows.require(first | ~after_final, "first", "a start after a final row", first)
        rows.require(~first | ~(rows.follows & ~after_final), "first", "a start only after a final row", first)


def _check_ends(storage: ReplayStorage, rows: _Rows) -> None:
    """Flags are where episodes end, and environments reset where the flags say so."""
    ring, kind = storage.ring, rows.kind
    terminated, truncated = (storage.columns[storage.schema.columns[name][0]] for name in ("terminated", "truncated"))
    ended = rows.is_step & (terminated | truncated)
    after_end = rows.after(ended)
    if storage.keeps_next:
        is_reset = rows.follows & (kind == FINAL)
        rows.require(after_end | ~is_reset, "kind", "an end before the row that resets", kind)
    else:
        closed = (kind == FINAL) | ((kind == PENDING) & storage.next_step)
        rows.require(closed | ~after_end, "kind", "final after an end", kind)
    if not storage.next_step:
        return
    # After an end the coming row resets; what is stored beside its rows shows no cut that has undone that.
    envs = torch.arange(ring.num_envs, device=storage.device)
    stored = ring.head > ring.floor
    led_by_end = stored & ended.view(-1)[ring.at((ring.head - 1).clamp(min=0), envs)]
    require_all(
        led_by_end | ~(ring.resetting & stored),
        "resetting",
        "False, except after an end in the newest row",
        ring.resetting,
    )
    require_all(ring.resetting | ~(led_by_end & ring.open), "resetting", "True after an end", ring.resetting)


def _check_counts(storage: ReplayStorage) -> None:
    """Everything that is remembered about the kinds, and the native twin, agrees with them."""
    ring = storage.ring
    drawable = ring.kind == TRANSITION
    counted = drawable.sum(0)
    require_all(ring.count == counted, "count", "the number of transitions", ring.count)
    total = int(counted.sum())
    require(len(storage) == total, "len", f"{total}, the number of transitions", len(storage))
    slots = drawable.view(-1).nonzero().squeeze(1)
    ids = storage.ids(slots)
    require_all(ring.locate(ids)[0] == slots, "ids", "ids that map back to their slots", ids)
    if storage._shares is not None:
        expected = drawable.view(-1).cumsum(0).double() / total
        require_all(storage._shares == expected, "running shares", "the shares of the transitions", storage._shares)
    if storage._row_ids is not None:
        require_all(storage._row_ids == ring.ids(), "ids of slots", "the ids of the rows", storage._row_ids)
