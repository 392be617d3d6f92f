"""Rows on any device, written and read by torch ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from relive.errors import SchemaError, verify
from relive.kernels import complete
from relive.kernels.torch_ops import add_axes
from relive.replay.backend import Backend, ChangedSlots, make_unissued_id_error
from relive.replay.continuity import StepContinuityStats, count_step_continuity
from relive.replay.ring import FINAL, HISTORY, MAX_ID, MAX_ROWS_PER_STEP, NO_ID, PENDING, TRANSITION, Ring
from relive.replay.row_storage import RowStorage
from relive.rng import Randomness
from relive.schema.conversion import as_indexable, as_numpy_if_cpu, view_as_numpy
from relive.schema.fields import Stacked
from relive.schema.invariants import verify_elements


class DeviceBackend(Backend):
    """The base class of the backends for devices, whose rows are written without waiting for the device."""

    def __init__(self, rows: RowStorage) -> None:
        super().__init__(rows)
        self.counter.is_on = False
        self.is_empty = True
        """Whether this backend has written nothing since the last clear, which the host knows without synchronising."""
        self._counts = as_numpy_if_cpu(rows.ring.count)
        """The ring's number of transitions per environment."""
        self._rows_left = MAX_ID // self.num_envs
        """Minimum number of rows per environment until ids exceed int64."""

    def _reserve_ids(self, num_steps: int) -> None:
        """Raise if the remaining ids do not suffice for `num_steps` more steps."""
        if self._rows_left < MAX_ROWS_PER_STEP * num_steps:
            self._rows_left = self.ring.require_rows_left(num_steps)
        self._rows_left -= MAX_ROWS_PER_STEP * num_steps

    def rewrite(self, slots: torch.Tensor, leaves: dict[int, torch.Tensor]) -> None:
        # A device writes repeated slots in any order, so each slot's entries all take the values of the last one.
        # Entries with the slot -1 write the values of the highest slot once more.
        order = slots.argsort(stable=True)
        sorted_slots = slots[order]
        highest = sorted_slots[-1]
        target = torch.where(slots < 0, highest, slots)
        last = order[torch.searchsorted(sorted_slots, target, right=True) - 1]
        has_row, target_slots = highest >= 0, target.clamp(min=0)
        columns = {i: as_indexable(self.rows.leaves[i].flatten(0, 1)) for i in leaves}
        values = {
            i: torch.where(has_row, as_indexable(leaf)[last], columns[i][target_slots]) for i, leaf in leaves.items()
        }

        def change() -> None:
            for i, column in columns.items():
                column[target_slots] = values[i]

        complete(change)

    def clear(self) -> None:
        super().clear()
        self.is_empty = True

    def rebuild_caches(self) -> None:
        self.is_empty = not bool((self.ring.head > self.ring.floor).any())
        self._rows_left = self.ring.num_rows_left()

    def __len__(self) -> int:
        return int(self._counts.sum())

    def check(self) -> None:
        super().check()
        if self.rows.has_values:
            self._check_is_empty(bool((self.ring.head > self.ring.floor).any()))

    def _check_is_empty(self, has_rows: bool) -> None:
        verify(self.is_empty != has_rows, "is_empty", f"{not has_rows}, as the heads show", self.is_empty)


class TorchBackend(DeviceBackend):
    """Writes and reads rows with torch ops; only `len`, `stored` and `check` synchronise.

    Two tables of all slots save launches per batch: an index for uniform draws, and the ids by slot. Each table is
    built when it is first needed, and then updated by writes.
    """

    def __init__(self, rows: RowStorage) -> None:
        super().__init__(rows)
        self._is_host = rows.device.type == "cpu"
        """Whether the rows are on the CPU, where reading a result needs no synchronisation."""
        self.counter.is_on = self._is_host
        self._written: list[WrittenStep] = []
        self._uniform_index = UniformIndex(rows.ring, in_order=not rows.stores_next_obs)
        self._last_draw: tuple[torch.Tensor, torch.Tensor, int] | None = None
        """Slots of the last draw, their entries in the index, and torch's counter of in-place writes to the slots."""
        self._row_table: torch.Tensor | None = None
        """Slot, next slot and id [3, S·N] of all flat slots; the id is `NO_ID` without a transition."""

    def write(
        self, leaves: tuple[Any, ...], next_leaves: tuple[Any, ...], envs: torch.Tensor | None,
        steps: int | None = None, on_complete: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._reserve_ids(1 if steps is None else steps)
        leaves, next_leaves = self.rows.convert_step(leaves, next_leaves, envs, steps)
        writer = TorchWriter(self.rows, leaves, next_leaves, envs, steps is not None, counts=self.counter.is_on)
        complete(partial(self._write, writer, self.counter.stats, on_complete))
        if writer.write_error is not None:
            raise writer.write_error
        if self.counter.is_on:
            self.warning = self.counter.take_next_warning(self.counter.stats)

    def _write(self, writer: TorchWriter, stats: StepContinuityStats, on_complete: Callable[[], None] | None) -> None:
        """Perform a write, or continue it after an interruption."""
        is_first_attempt, writer.is_first_attempt = writer.is_first_attempt, False
        self._written = writer.write()
        if writer.write_error is not None:
            return
        self._last_draw, self.counter.stats, self.is_empty = None, stats + writer.counted, False
        if is_first_attempt:
            self._uniform_index.add_steps(self._written)
            self._update_row_table()
        else:
            self._discard_tables()
        if on_complete is not None:
            on_complete()

    def changed_slots(self) -> ChangedSlots:
        """Return the slots that the last write filled, and the slots of rows that became too old to be drawn."""
        slots = [each for step in self._written for each in (step.slots.view(-1), step.retired) if each is not None]
        return slots[0] if len(slots) == 1 else torch.cat(slots), None

    def clear(self) -> None:
        super().clear()
        self._discard_tables()

    def rebuild_caches(self) -> None:
        super().rebuild_caches()
        self._discard_tables()

    def _discard_tables(self) -> None:
        self._uniform_index.discard()
        self._row_table = self._last_draw = None

    def _update_row_table(self) -> None:
        if self._row_table is None:
            return
        ids = self._row_table[2]
        for step in self._written:
            if step.retired is not None:
                ids.index_fill_(0, step.retired, NO_ID)
            ids.index_fill_(0, step.slots[-1], NO_ID)
            rows = step.ids[0] if step.is_reset is None else step.ids[0].masked_fill(step.is_reset, NO_ID)
            ids.index_copy_(0, step.slots[0], rows)

    # The table is made outside inference mode, because inference tensors could not be updated later.
    @torch.inference_mode(False)
    def _get_row_table(self) -> torch.Tensor:
        if self._row_table is None:
            slots = torch.arange(self.ring.size, device=self.device)
            self._row_table = torch.stack([slots, self.ring.shift(slots), self.ring.ids()])
        return self._row_table

    @property
    def may_be_empty(self) -> bool:
        return not len(self) if self._is_host else self.is_empty

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        entries = self._uniform_index.draw(count, random)
        slots = entries[0]
        num_writes = self._get_version(slots)
        self._last_draw = None if num_writes is None else (slots, entries, num_writes)
        return slots

    def set_mass_of_written_rows(self, mass: float | torch.Tensor) -> None:
        slots, _ = self.changed_slots()
        # Mass is float64: float32 would overflow and underflow.
        if not isinstance(mass, torch.Tensor):
            mass = torch.full((), mass, dtype=torch.float64, device=slots.device)
        self.priority_tree().set(slots, mass * (self.ring.kind_at(slots) == TRANSITION))

    def find_next_and_ids(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.stores_next_obs:
            return super().find_next_and_ids(slots)
        rows = self._find_last_draw_entries(slots)
        if rows is None:
            rows = self._get_row_table().index_select(1, slots)
        return rows[:2], rows[2]

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        entries = self._find_last_draw_entries(slots)
        return self.ring.ids_at(slots) if entries is None else entries[-1]

    def _find_last_draw_entries(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return the uniform index's entries for these slots if the last draw returned the slots, else None."""
        # A sampler that changes the slots in place increases torch's counter of writes, so the entries are not used.
        if self._last_draw is None or self._last_draw[0] is not slots or self._get_version(slots) != self._last_draw[2]:
            return None
        return self._last_draw[1]

    @staticmethod
    def _get_version(tensor: torch.Tensor) -> int | None:
        """Return torch's counter of in-place writes; None for inference tensors."""
        return None if tensor.is_inference() else tensor._version

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        candidate_slots = ids % self.ring.size
        slots = candidate_slots.masked_fill(self._get_row_table()[2].index_select(0, candidate_slots) != ids, -1)
        # Ids that were never issued raise only on the CPU, because the check would synchronise on other devices.
        if self._is_host and ((slots.numpy() < 0) | (ids.numpy() < 0)).any():
            _, is_unissued = self.ring.locate(ids)
            if is_unissued.any():
                raise make_unissued_id_error(ids, int(is_unissued.nonzero()[0]))
        return slots

    def check(self) -> None:
        super().check()
        if not self.rows.has_values:
            return
        self._uniform_index.check()
        if self._row_table is not None:
            ids = self._row_table[2]
            verify_elements(ids == self.ring.ids(), "ids of slots", "the ids of the rows", ids)


class UniformIndex:
    """Index of the j-th transition of each environment: a draw is one random int below the number of transitions.

    The first draw scans all slots to build the index, which writes then update.
    """

    def __init__(self, ring: Ring, *, in_order: bool) -> None:
        self._ring, self._in_order = ring, in_order
        self._entries: torch.Tensor | None = None
        """Slot, next slot and id [3, S·N] of the j-th transition of environment e, at (j mod S) · N + e.

        Without the next slot if next observations are stored explicitly.
        """
        self._ends = self._starts = self._bounds = self._total = torch.empty(0, device="cpu")

    def discard(self) -> None:
        """Discard the index; the next draw rebuilds it."""
        self._entries = None

    def add_steps(self, steps: list[WrittenStep]) -> None:
        """Add the rows of written steps. The ring's counts already exclude rows that became too old."""
        if self._entries is None:
            return
        size, num_envs = self._ring.size, self._ring.num_envs
        for step in steps:
            ends = self._ends if step.envs is None else self._ends[step.envs]
            self._entries.index_copy_(1, ends % size, torch.cat([step.slots, step.ids[:1]]))
            # The index entry of a dummy step is not counted, so the entry of the next row overwrites it.
            num_added = num_envs if step.is_reset is None else (~step.is_reset).long() * num_envs
            if step.envs is None:
                self._ends += num_added
            else:
                self._ends[step.envs] = ends + num_added
        self._update_bounds()

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        """Draw entries of transitions [3, count] uniformly, with replacement."""
        if self._entries is None:
            self._entries = self._make_entries()
            self._update_bounds()
        number = random.integers(count, self._ring.kind.device) % self._total
        env = torch.searchsorted(self._bounds, number, right=True)
        places = torch.add(self._starts.index_select(0, env), number, alpha=self._ring.num_envs)
        return self._entries.index_select(1, places % self._ring.size)

    def _update_bounds(self) -> None:
        counts = self._ring.count.cumsum(0)
        # The bounds omit the last sum, so that every random number maps to an environment, even in an empty ring.
        self._bounds = counts[:-1]
        self._total = counts[-1].clamp(min=1)
        self._starts = torch.sub(self._ends, counts, alpha=self._ring.num_envs)

    # The index is made outside inference mode, because inference tensors could not be updated later.
    @torch.inference_mode(False)
    def _make_entries(self) -> torch.Tensor:
        ring = self._ring
        self._ends = torch.add(ring.first_ids[0], ring.count, alpha=ring.num_envs)
        ids = ring.ids().view(ring.slots, -1)
        ids = ids.masked_fill_(ids < 0, MAX_ID).sort(0).values
        slots = ids % ring.size
        entry = (slots, ring.shift(slots), ids) if self._in_order else (slots, ids)
        return torch.stack(entry).view(len(entry), -1)

    def check(self) -> None:
        if self._entries is None:
            return
        ring, rebuilt = self._ring, UniformIndex(self._ring, in_order=self._in_order)
        rebuilt._entries = rebuilt._make_entries()
        number = torch.arange(ring.slots, device=ring.kind.device).unsqueeze(1)
        first = self._ends - ring.count * ring.num_envs
        places = (first + number * ring.num_envs) % ring.size
        expected = rebuilt._entries.view(-1, ring.slots, ring.num_envs)
        is_consistent = (self._entries[:, places] == expected).all(0) | (number >= ring.count)
        verify_elements(
            is_consistent, "uniform index", "the transitions of each environment", self._entries[-1][places]
        )
        drawable = (ring.kind == TRANSITION).sum()
        verify_elements(self._total == drawable.clamp(min=1), "uniform index", "the number of transitions", self._total)


class WrittenStep(NamedTuple):
    """Rows of one written step, and the rows that follow them.

    The following rows hold the next observations, unless the buffer has next_obs="stored".
    """

    envs: torch.Tensor | None
    """Environments of the step; None if all environments stepped."""
    ids: torch.Tensor
    """Ids [2, K] of the rows and the rows after them; [1, K] if next observations are stored."""
    slots: torch.Tensor
    """Slots of `ids`. The slots of the rows after the step hold no transitions."""
    is_reset: torch.Tensor | None
    """Mask [K] of steps that only reset and are no transitions; None unless the mode is NEXT_STEP."""
    retired: torch.Tensor | None
    """Slots [2 K] of rows that became too old to be drawn; None if new rows overwrite them in the same step."""


class TorchWriter:
    """Writes one step, or a block of steps in time order, of all environments or of `envs`: all or nothing.

    A signal may interrupt `write` anywhere. Calling it again completes the write, because each step is computed from
    the stored rows before anything is assigned. With `counts`, `counted` holds the number of steps that do not start
    where the previous step led, and of similar faults; counting them synchronises.
    """

    def __init__(
        self, rows: RowStorage, leaves: tuple[torch.Tensor, ...], next_leaves: tuple[torch.Tensor, ...],
        envs: torch.Tensor | None, is_block: bool, *, counts: bool,
    ) -> None:  # fmt: skip
        self._rows, self._ring, self._envs = rows, rows.ring, envs
        self._counts, self.counted = counts, StepContinuityStats()
        ids = self._ring.first_ids[:1] if rows.stores_next_obs else self._ring.first_ids
        self._first_ids = ids if envs is None else ids[:, envs]
        self._steps, self._next_steps = (
            [self._add_missing_axes(leaf, is_block) for leaf in group] for group in (leaves, next_leaves)
        )
        ring, self._kind, self._first = self._ring, self._ring.kind.view(-1), self._ring.first.view(-1)
        self._ring_state = (ring.head, ring.open, ring.resetting, ring.count)
        self._env_state = self._ring_state if envs is None else tuple(each[envs] for each in self._ring_state)
        """The ring state of the written environments: the ring's tensors, or copies that `write` copies back."""
        self._head, self._open, self._resetting, self._count = self._env_state
        self._written: list[WrittenStep] = []
        self._current: tuple[WrittenStep, StepContinuityStats] | None = None
        """The current step: its rows and its continuity; None between steps."""
        self._changes: list[Callable[[], Any]] = []
        """The assignments of the current step, in order. Applying all of them again changes nothing."""
        # Old values are kept only for a block of frame stacks, which may be refused after its first steps were written.
        can_be_undone = rows.stacked and is_block and rows.device.type == "cpu"
        undo = (*self._env_state, ring.kind, ring.first, *rows.leaves) if can_be_undone else ()
        self._old_values = [(tensor, tensor.clone()) for tensor in undo]
        self.write_error: SchemaError | None = None
        """The error that refuses this write; None if the write is valid."""
        self.is_first_attempt = True
        """Whether `write` was not interrupted; an interruption may leave the backend's tables half updated."""

    def write(self) -> list[WrittenStep]:
        """Write the steps, or the remaining steps after an interruption, and return them."""
        steps, next_steps = self._steps, self._next_steps
        while self.write_error is None and len(self._written) < len(steps[0]):
            t = len(self._written)
            try:
                if self._current is None:
                    self._current = self._plan_step([leaf[t] for leaf in steps], [leaf[t] for leaf in next_steps])
                written, counted = self._current
                for change in self._changes:
                    change()
                after, counted = [*self._written, written], self.counted + counted
                # A signal cannot separate these assignments: they are one statement without calls.
                self._written, self.counted, self._current = after, counted, None
            except SchemaError as error:
                self.write_error = error
        if self.write_error is not None:
            for tensor, old_values in self._old_values:
                tensor.copy_(old_values)
        elif self._envs is not None:
            for tensor, new_values in zip(self._ring_state, self._env_state, strict=True):
                tensor[self._envs] = new_values
        return self._written

    def _add_change(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Append a call to `_changes`, the assignments that store the current step."""
        self._changes.append(partial(function, *arguments, **options))

    def _add_missing_axes(self, leaf: torch.Tensor, is_block: bool) -> torch.Tensor:
        leaf = leaf if is_block else leaf.unsqueeze(0)
        return leaf if self._rows.leading_shape else leaf.unsqueeze(1)

    def _plan_step(
        self, leaves: list[torch.Tensor], next_leaves: list[torch.Tensor]
    ) -> tuple[WrittenStep, StepContinuityStats]:
        """Compute the rows and the continuity of one step; `_changes` then holds the assignments that store it."""
        rows, ring, self._changes = self._rows, self._ring, []
        continuity = StepContinuityStats()
        if self._counts:
            obs, env = [leaves[i] for i in rows.obs_leaves], self._first_ids[0]
            continuity = count_step_continuity(rows, obs, env, self._head, self._open, self._resetting)
            rewards = (leaves[i] for i in rows.schema.leaf_indices["reward"])
            infinite = any(x.is_floating_point() and not _is_finite(x) for x in rewards)
            continuity += StepContinuityStats(infinite=int(infinite))
        reset = self._resetting.clone() if rows.next_step else None
        pending = torch.add(self._first_ids[0], self._head, alpha=ring.num_envs) % ring.size
        continues = self._find_continuing_steps(leaves, next_leaves, pending, reset)
        # A step that does not continue the pending row is written to the row after it.
        head = self._head + (self._open > continues)
        ids = torch.add(self._first_ids, head, alpha=ring.num_envs)
        slots = ids % ring.size
        retired, count = self._retire_oldest_rows(ids, slots)
        # The pending row becomes final here; if the step continues it, `_write_row` overwrites this kind.
        self._add_change(self._kind.index_fill_, 0, pending, FINAL)
        self._write_row(leaves, slots[0], ~continues, reset)
        self._add_change(torch.add, count, 1 if reset is None else ~reset, out=self._count)
        terminated, truncated = (leaves[rows.schema.leaf_indices[name][0]] for name in ("terminated", "truncated"))
        end = terminated | truncated
        if rows.stores_next_obs:
            for column, leaf in zip(rows.next_leaves, next_leaves, strict=True):
                self._add_change(as_indexable(column.flatten(0, 1)).index_copy_, 0, slots[0], as_indexable(leaf))
            self._add_change(torch.add, head, 1, out=self._head)
        else:
            self._write_next_obs(next_leaves, slots[1], head, reset, None if rows.next_step else end)
        if reset is not None:
            self._add_change(self._resetting.copy_, end & ~reset)
        return WrittenStep(self._envs, ids, slots, reset, retired), continuity

    def _find_continuing_steps(
        self, leaves: list[torch.Tensor], next_leaves: list[torch.Tensor], pending: torch.Tensor,
        reset: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return a mask of steps that overwrite the pending row: they continue from its observation, or only reset."""
        rows = self._rows
        continues = self._open
        for i in rows.obs_leaves if not rows.stores_next_obs else ():
            continues = continues & _find_equal_rows(rows.read_bits(i, pending), leaves[i])
        if rows.stacked:
            self._check_stacks(leaves, next_leaves, continues, reset)
        return continues if reset is None else continues | (self._open & reset)

    def _retire_oldest_rows(self, ids: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Remove the oldest transitions to make room.

        Return the slots of the rows that stay readable for frame stacks and windows (None if no row does), and the
        number of transitions per environment afterwards.
        """
        ring = self._ring
        keeps_history = ring.slots > ring.num_sampleable
        expiring_slots = ((ids - ring.num_sampleable * ring.num_envs) % ring.size if keeps_history else slots).view(-1)
        kind = self._kind.index_select(0, expiring_slots)
        is_expiring = kind == TRANSITION
        if keeps_history:
            self._add_change(self._kind.index_copy_, 0, expiring_slots, kind.masked_fill_(is_expiring, HISTORY))
        return expiring_slots if keeps_history else None, self._count - is_expiring.view(ids.shape).sum(0)

    def _write_row(
        self, leaves: list[torch.Tensor], slots: torch.Tensor, is_start: torch.Tensor, reset: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Write the row of the step: a transition, or final if it only resets."""
        rows = self._rows
        for i, (column, leaf) in enumerate(zip(rows.leaves, leaves, strict=True)):
            flat, bits = as_indexable(column.flatten(0, 1)), as_indexable(self._select_stored_frame(i, leaf))
            # The observation of a dummy step was stored with the previous step, so it is kept.
            if reset is not None and i in rows.obs_leaves:
                bits = torch.where(add_axes(is_start, bits), bits, flat.index_select(0, slots))
            self._add_change(flat.index_copy_, 0, slots, bits)
        if reset is None:
            self._add_change(self._kind.index_fill_, 0, slots, TRANSITION)
        else:
            # Dummy steps get the kind FINAL, which is TRANSITION + 1, so the flag is added to TRANSITION.
            self._add_change(self._kind.index_copy_, 0, slots, reset.view(torch.uint8) + TRANSITION)
            # A pending row that starts an episode keeps its flag `first` when the step overwrites it.
            is_start |= self._first.index_select(0, slots)
        self._add_change(self._first.index_copy_, 0, slots, is_start)

    def _write_next_obs(
        self, next_leaves: list[torch.Tensor], slots: torch.Tensor, head: torch.Tensor, starts: torch.Tensor | None,
        is_end: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write the next observations as the newest rows: pending, or final at the end of an episode."""
        rows = self._rows
        for i, leaf in zip(rows.obs_leaves, next_leaves, strict=True):
            flat = as_indexable(rows.leaves[i].flatten(0, 1))
            self._add_change(flat.index_copy_, 0, slots, as_indexable(self._select_stored_frame(i, leaf)))
        if starts is None:
            self._add_change(self._first.index_fill_, 0, slots, False)
        else:
            self._add_change(self._first.index_copy_, 0, slots, starts)
        if is_end is None:
            self._add_change(self._kind.index_fill_, 0, slots, PENDING)
            self._add_change(torch.add, head, 1, out=self._head)
            self._add_change(self._open.fill_, True)
        else:
            # Where an episode ends, the kind is FINAL, which is PENDING - 1, so the flag is subtracted from PENDING.
            self._add_change(self._kind.index_copy_, 0, slots, PENDING - is_end.view(torch.uint8))
            self._add_change(torch.add, head + 1, is_end, out=self._head)
            self._add_change(torch.logical_not, is_end, out=self._open)

    def _check_stacks(
        self, leaves: list[torch.Tensor], next_leaves: list[torch.Tensor], continues: torch.Tensor,
        reset: torch.Tensor | None,
    ) -> None:  # fmt: skip
        rows = self._rows
        num_invalid = rows.num_invalid_stacks
        reset = torch.zeros_like(continues) if reset is None else reset
        for place, i in enumerate(rows.obs_leaves):
            field = rows.schema.fields[i]
            if not isinstance(field, Stacked):
                continue
            stack, next_stack = (group.movedim(1 + field.axis, 1) for group in (leaves[i], next_leaves[place]))
            padding = stack[:, -1:] if field.pad == "repeat" else torch.zeros_like(stack[:, -1:])
            is_invalid = ~(continues | reset | _find_equal_rows(stack[:, :-1], padding.expand_as(stack[:, :-1])))
            is_invalid_next = ~(reset | _find_equal_rows(next_stack[:, :-1], stack[:, 1:]))
            if rows.device.type != "cpu":
                num_invalid = num_invalid + (is_invalid | is_invalid_next).sum()
            elif is_invalid.any():
                raise rows.make_stack_error(i)
            elif is_invalid_next.any():
                raise rows.make_stack_error(len(rows.leaves) + place)
        if num_invalid is not rows.num_invalid_stacks:
            self._add_change(rows.num_invalid_stacks.copy_, num_invalid)

    def _select_stored_frame(self, leaf_index: int, leaf: torch.Tensor) -> torch.Tensor:
        """Return the part of a leaf to store: the newest frame of a stack, or the whole leaf without stacking."""
        field = self._rows.schema.fields[leaf_index]
        return leaf.select(1 + field.axis, field.k - 1) if isinstance(field, Stacked) else leaf


_BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integer dtypes to compare bits with, by element size in bytes."""


def _find_equal_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of rows with equal bytes, for which NaN equals itself and 0.0 differs from -0.0."""
    dtype = _BIT_DTYPES[a.element_size()]
    # `as_strided` is needed because an axis of length 1 may have any stride, which `view(dtype)` rejects.
    a, b = (x.contiguous().as_strided((x.numel(),), (1,)).view(dtype).view(len(x), -1) for x in (a, b))
    is_equal = a == b
    # On the CPU, `amin` of bytes is several times faster than `all(1)`.
    return is_equal.view(torch.uint8).amin(1).view(torch.bool) if is_equal.numel() else is_equal.all(1)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a host tensor are finite."""
    # Values on the CPU are checked by numpy, which is faster than torch for few numbers.
    array = view_as_numpy(tensor)
    return bool(tensor.isfinite().all() if array is None else np.isfinite(array).all())
