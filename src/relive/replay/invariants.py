"""The invariants of stored rows, and their verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from relive.errors import InvariantError, explain, verify
from relive.replay.ring import EMPTY, FINAL, HISTORY, PENDING, TRANSITION, Ring
from relive.schema.conversion import path_name
from relive.schema.invariants import (
    overflow_warnings,
    to_host_array,
    verify_addresses,
    verify_elements,
    verify_flags,
    verify_layout,
)

if TYPE_CHECKING:
    from relive.replay.backend import Backend
    from relive.replay.row_storage import RowStorage

_MAX_COMPARED_ROWS = 4096
"""Maximum number of rows per environment whose ids are compared."""
_KIND_NAMES = ("empty", "transition", "final", "pending", "history")


def check_rows(rows: RowStorage, is_valid: Callable[[], bool] | None = None) -> None:
    """Verify the shapes of leaves, and that the ring holds complete transitions of separate episodes.

    `is_valid` is the fast native check of the ring. If it fails, the checks in Python find and name the violation.
    """
    _check_tensor_layouts(rows)
    if not rows.has_values:
        return
    for fault in find_device_faults(rows):
        raise InvariantError(fault)
    if is_valid is not None and is_valid():
        return
    host = _HostRows(rows)
    _check_heads_and_flags(rows, host)
    _check_row_kinds(rows, host)
    _check_episode_borders(rows, host)
    _check_episode_ends(rows, host)
    num_transitions = np.count_nonzero(host.kind == TRANSITION, axis=0)
    verify_elements(host.count == num_transitions, "count", "the number of transitions", host.count)


def find_device_faults(rows: RowStorage) -> Iterator[str]:
    """Yield messages about invalid inputs, which a device only counts: to raise, every call would have to wait."""
    num_invalid = int(rows.num_invalid_stacks) if rows.has_values else 0
    if num_invalid:
        remedy = "Check k, axis and pad: only stacks that single frames can rebuild are stored."
        yield explain("obs", "stacks of the stored frames", f"{num_invalid} steps with other stacks", remedy)
    yield from overflow_warnings(rows.overflowed)
    num_unknown = int(rows.unknown_envs) if rows.has_values else 0
    if num_unknown:
        got, remedy = f"{num_unknown} others, skipped", "Number environments from 0."
        yield explain("env_ids", f"environments 0 to {rows.ring.num_envs - 1}", got, remedy)


def _check_tensor_layouts(rows: RowStorage) -> None:
    ring, schema = rows.ring, rows.schema
    num_envs = rows.leading_shape[0] if rows.leading_shape else 1
    num_sampleable = rows.rows_per_env + (not rows.stores_next_obs)
    expected = (num_envs, num_sampleable, num_sampleable + schema.max_stack_frames - 1)
    got = (ring.num_envs, ring.num_sampleable, ring.slots)
    verify(got == expected, "ring", f"(environments, rows, slots) {expected}", got)
    copied_leaves = rows.obs_leaves if rows.stores_next_obs else ()
    fields = [*schema.fields, *(schema.fields[i] for i in copied_leaves)]
    ring_specs = Ring.state_specs(ring.slots, ring.num_envs)
    paths = [*schema.paths, *(rows.next_paths if copied_leaves else ()), *((name,) for name in ring_specs)]
    leaf_specs = (((ring.slots, ring.num_envs, *field.shape), field.dtype) for field in fields)
    for path, tensor, (shape, dtype) in zip(paths, rows.tensors, (*leaf_specs, *ring_specs.values()), strict=True):
        verify_layout(path_name(path), tensor, shape, dtype, rows.device)
    verify_addresses(paths, rows.tensors, rows.addresses)


def _check_heads_and_flags(rows: RowStorage, host: _HostRows) -> None:
    terminated, truncated = rows.end_flags()
    ring = rows.ring
    for name, tensor in (
        ("terminated", terminated), ("truncated", truncated), ("first", ring.first), ("open", ring.open),
        ("resetting", ring.resetting),
    ):  # fmt: skip
        verify_flags(name, tensor)
    verify_elements(host.floor >= 0, "floor", "a row of at least 0", host.floor)
    verify_elements(host.head >= host.floor, "head", "a row of at least the floor", host.head)
    max_head = np.iinfo(np.int64).max // ring.num_envs - 1
    verify_elements(host.head <= max_head, "head", f"a row of at most {max_head}, for ids of int64", host.head)
    may_be_open = (host.head > host.floor) & (not rows.stores_next_obs)
    verify_elements(may_be_open | ~host.open, "open", "False without a step before the row", host.open)
    may_reset = (host.open | rows.stores_next_obs | (host.head == host.floor)) & rows.next_step
    expected = "False, except after an end under autoreset=NEXT_STEP"
    verify_elements(may_reset | ~host.resetting, "resetting", expected, host.resetting)


class _HostRows:
    """The ring state and the flags of rows as numpy arrays, and masks [S, N] of rows by their age.

    See `Ring` for the names of the arrays. The newest row of an environment has age 0. Ages fit in int32, which
    compares faster than row numbers.
    """

    kind: np.ndarray
    first: np.ndarray
    head: np.ndarray
    open: np.ndarray
    resetting: np.ndarray
    count: np.ndarray
    floor: np.ndarray

    def __init__(self, rows: RowStorage) -> None:
        ring, slots = rows.ring, rows.ring.slots
        vars(self).update((name, to_host_array(tensor)) for name, tensor in ring.state.items())
        self.terminated, self.truncated = map(to_host_array, rows.end_flags())
        self._newest = self.head - ~self.open
        age_dtype = np.int32 if slots < 1 << 30 else np.int64
        max_age = np.minimum(self._newest - self.floor, slots).astype(age_dtype)
        self.age = (self._newest % slots).astype(age_dtype) - np.arange(slots, dtype=age_dtype)[:, None]
        self.age[self.age < 0] += slots
        self.is_stored = self.age <= max_age
        self.is_oldest = self.age == max_age
        self.is_newest = self.is_stored & (self.age == 0)
        self.is_sampleable = self.age < ring.num_sampleable
        self.may_lack_frames = self.age > max_age - (slots - ring.num_sampleable)
        """Mask of rows whose older frames may have been dropped."""
        self.is_step = (self.kind == TRANSITION) | (self.kind == HISTORY)
        self.has_predecessor = self.age < np.minimum(max_age, slots - 1)
        """Mask of rows whose preceding row is stored."""

    def has_predecessor_in(self, mask: np.ndarray) -> np.ndarray:
        """Return a mask of the rows whose predecessor is in `mask`."""
        return np.roll(mask, 1, 0) & self.has_predecessor

    def verify_rows(self, is_valid: np.ndarray, name: str, expected: str, got: np.ndarray) -> None:
        """Raise an InvariantError that names the first row where `is_valid` is False and its value `got`."""
        if is_valid.all():
            return
        slot, env = np.argwhere(~is_valid)[0].tolist()
        where = f"{name} of row {int(self._newest[env] - self.age[slot, env])}, environment {env}"
        got_value = _KIND_NAMES[int(got[slot, env])] if name == "kind" else got[slot, env].item()
        remedy = "Call clear(), or load a checkpoint: the memory was changed from outside the buffer."
        raise InvariantError(explain(where, expected, got_value, remedy))


def _check_row_kinds(rows: RowStorage, host: _HostRows) -> None:
    """Verify that the kind of every slot (empty, transition, pending, …) is one that a row of its age can have."""
    ring, kind = rows.ring, host.kind
    verify_elements(kind < len(_KIND_NAMES), "kind", f"one of 0 to {len(_KIND_NAMES) - 1}", kind)
    host.verify_rows((kind != EMPTY) | ~host.is_stored, "kind", "a row that was written", kind)
    verify_elements((kind == EMPTY) | host.is_stored, "kind", "0 (empty) where no row was written", kind)
    is_open = host.is_newest & host.open
    host.verify_rows((kind == PENDING) | ~is_open, "kind", "pending at the open head", kind)
    host.verify_rows((kind != PENDING) | is_open, "kind", "pending only at an open head", kind)
    host.verify_rows(
        host.is_sampleable | (kind != TRANSITION),
        "kind",
        f"no transition {ring.num_sampleable} rows before the head",
        kind,
    )
    # If older rows were dropped, the oldest remaining rows lack frames of their stacks. They become history: only
    # the stacks of later rows still need them.
    may_be_history = ~host.is_sampleable | host.may_lack_frames
    # Recovery from a power failure changes a half rewritten row to history; only mutable leaves are rewritten.
    may_be_history |= bool(rows.mutable)
    host.verify_rows(
        may_be_history | (kind != HISTORY), "kind", f"no history in the newest {ring.num_sampleable} rows", kind
    )
    if not rows.stores_next_obs:
        host.verify_rows(~(host.is_step & host.is_newest), "kind", "no transition as the newest row", kind)


def _check_episode_borders(rows: RowStorage, host: _HostRows) -> None:
    """Verify that final rows, and only they, separate episodes, and that the flag `first` marks the first rows."""
    kind, first, final = host.kind, host.first, host.kind == FINAL
    after_final = host.has_predecessor_in(final)
    if not rows.next_step:
        host.verify_rows(~(final & (after_final | host.is_oldest)), "kind", "a transition before a final row", kind)
    else:
        # Two final rows may follow each other: a reset, and an observation from which no step was taken.
        is_second_final = final & after_final
        host.verify_rows(
            ~(final & host.has_predecessor_in(is_second_final)), "kind", "at most two final rows in a row", kind
        )
    if rows.stores_next_obs:
        host.verify_rows(first | ~host.is_stored, "first", "a start in every unordered row", first)
    else:
        host.verify_rows(first | ~after_final, "first", "a start after a final row", first)
        host.verify_rows(
            ~first | ~(host.has_predecessor & ~after_final), "first", "a start only after a final row", first
        )


def _check_episode_ends(rows: RowStorage, host: _HostRows) -> None:
    """Verify that an episode ends at every terminated or truncated row, and that NEXT_STEP resets follow these rows."""
    ring, kind = rows.ring, host.kind
    ended = host.is_step & (host.terminated | host.truncated)
    after_end = host.has_predecessor_in(ended)
    if rows.stores_next_obs:
        is_reset = host.has_predecessor & (kind == FINAL)
        host.verify_rows(after_end | ~is_reset, "kind", "an end before the row that resets", kind)
    else:
        is_closed = (kind == FINAL) | ((kind == PENDING) & rows.next_step)
        host.verify_rows(is_closed | ~after_end, "kind", "final after an end", kind)
    if not rows.next_step:
        return
    # The next step after an end resets the environment, unless `cut()`, which is not stored, has cancelled the reset.
    stored = host.head > host.floor
    ended_before_head = stored & ended[np.maximum(host.head - 1, 0) % ring.slots, np.arange(ring.num_envs)]
    expected = "False, except after an end in the newest row"
    verify_elements(ended_before_head | ~(host.resetting & stored), "resetting", expected, host.resetting)
    verify_elements(host.resetting | ~(ended_before_head & host.open), "resetting", "True after an end", host.resetting)


def check_kernels(backend: Backend) -> None:
    """Verify that a backend's kernels agree with the ring's tensors."""
    ring = backend.ring
    count = int(ring.count.sum())
    verify(len(backend) == count, "len", f"{count}, the number of transitions", len(backend))
    # Some slots of every environment suffice, because all ids are computed from the head.
    stride = ring.kind.numel() // _MAX_COMPARED_ROWS + 1
    slot, env = (ring.kind[::stride] == TRANSITION).nonzero(as_tuple=True)
    slots = slot * stride * ring.num_envs + env
    ids = backend.ids(slots)
    verify_elements(ring.locate(ids)[0] == slots, "ids", "ids that map back to their slots", ids)
