"""Rows on any device, written and read by torch ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from relive.errors import SchemaError
from relive.kernels import complete
from relive.kernels.priority import PriorityTree, priority_tree
from relive.kernels.torch_ops import wide
from relive.replay.backend import Backend, ChangedSlots, never_issued
from relive.replay.continuity import ContinuityCounter, ContinuityStats, step_continuity, stored_continuity
from relive.replay.ring import FINAL, HISTORY, MAX_ID, MAX_ROWS_PER_STEP, NO_ID, PENDING, TRANSITION, Ring
from relive.replay.row_storage import RowStorage
from relive.rng import Randomness
from relive.schema.conversion import as_numpy_if_cpu, bits_of, numpy_view
from relive.schema.fields import Stacked
from relive.schema.invariants import require, require_all


class TorchBackend(Backend):
    """Torch ops, which never wait for its device, but for `len`, `stored` and `check`.

    Tables of all slots are kept where computing their entries for a batch would be several launches. Each is made when
    it is first needed, and then kept up by writes.
    """

    def __init__(self, rows: RowStorage) -> None:
        super().__init__(rows)
        self._waits = rows.device.type == "cpu"
        """Looking at a result holds nobody up."""
        self.counter = ContinuityCounter(is_on=self._waits)
        """How the steps that were written are joined."""
        self.is_empty = True
        """True if the host knows, without asking the device, that nothing was written since the last clear."""
        self._counted = as_numpy_if_cpu(rows.ring.count)
        self._written: list[Written] = []
        self._uniform_index = UniformIndex(rows.ring, in_order=not rows.stores_next_obs)
        self._drawn: tuple[torch.Tensor, torch.Tensor, int] | None = None
        """The slots of the last draw, and what the queues said of them."""
        self._row_table: torch.Tensor | None = None
        """Slot, following slot and id [3, S·N] of the transitions at all flat slots; of others the id is `NO_ID`."""
        self._tree: PriorityTree | None = None
        self._rows_left = MAX_ID // self.num_envs
        """How many rows an environment can be given yet, at least."""

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._use_rows(1 if steps is None else steps)
        leaves, nexts = self.rows.convert_step(leaves, nexts, envs, steps)
        writer = TorchWriter(self.rows, leaves, nexts, envs, steps is not None, counts=self.counter.is_on)
        complete(partial(self._write, writer, self.counter.seen, then))
        if writer.refusal is not None:
            raise writer.refusal
        if self.counter.is_on:
            self.warning = self.counter.next_warning(self.counter.seen)

    def _use_rows(self, steps: int) -> None:
        """Count the rows that so many steps may use; raises where their ids would exceed int64."""
        if self._rows_left < MAX_ROWS_PER_STEP * steps:
            self._rows_left = self.ring.require_rows_left(steps)
        self._rows_left -= MAX_ROWS_PER_STEP * steps

    def _write(self, writer: TorchWriter, seen: ContinuityStats, then: Callable[[], None] | None) -> None:
        """All of a write; after an interruption it goes on where it was."""
        has_tables, writer.has_tables = writer.has_tables, False
        self._written = writer.write()
        if writer.refusal is not None:
            return
        self._drawn, self.counter.seen, self.is_empty = None, seen + writer.counted, False
        if has_tables:
            self._uniform_index.follow(self._written)
            self._renew_row_table()
        else:  # they may have followed in part
            self._forget_tables()
        if then is not None:
            then()

    def rewrite(self, slots: torch.Tensor, leaves: dict[int, torch.Tensor]) -> None:
        # A device may write the rows of one slot in any order. So each row takes the values of the last row for its
        # slot, and a row without a slot is written as the row of the highest slot is.
        order = slots.argsort(stable=True)
        ordered = slots[order]
        highest = ordered[-1]
        target = torch.where(slots < 0, highest, slots)
        last = order[torch.searchsorted(ordered, target, right=True) - 1]
        has_row, at = highest >= 0, target.clamp(min=0)
        columns = {i: bits_of(self.rows.leaves[i].flatten(0, 1)) for i in leaves}
        values = {i: torch.where(has_row, bits_of(leaf)[last], columns[i][at]) for i, leaf in leaves.items()}

        def change() -> None:
            for i, column in columns.items():
                column[at] = values[i]

        complete(change)

    def continuity(self) -> ContinuityStats:
        """How the steps that were written here are joined."""
        return self.counter.seen

    def changed_slots(self) -> ChangedSlots:
        """Every slot that a row entered or left."""
        slots = [each for step in self._written for each in (step.slots.view(-1), step.left) if each is not None]
        return slots[0] if len(slots) == 1 else torch.cat(slots), None

    def clear(self) -> None:
        super().clear()
        self._forget_tables()
        self.is_empty = True

    def refresh(self) -> None:
        self._forget_tables()
        self.is_empty = not bool((self.ring.head > self.ring.floor).any())
        self._rows_left = self.ring.rows_left()

    def late_warnings(self) -> Iterator[str]:
        if not self.counter.is_on and self.rows.has_values:
            stats = stored_continuity(self.rows)
            while (message := self.counter.next_warning(stats)) is not None:
                yield message

    def _forget_tables(self) -> None:
        self._uniform_index.forget()
        self._row_table = self._drawn = None

    def _renew_row_table(self) -> None:
        if self._row_table is None:
            return
        ids = self._row_table[2]
        for step in self._written:
            if step.left is not None:
                ids.index_fill_(0, step.left, NO_ID)
            ids.index_fill_(0, step.slots[-1], NO_ID)
            rows = step.ids[0] if step.is_reset is None else step.ids[0].masked_fill(step.is_reset, NO_ID)
            ids.index_copy_(0, step.slots[0], rows)

    @torch.inference_mode(False)  # writes change them later, in whatever mode
    def _table_of_rows(self) -> torch.Tensor:
        if self._row_table is None:
            slots = torch.arange(self.ring.size, device=self.device)
            self._row_table = torch.stack([slots, self.ring.after(slots), self.ring.ids()])
        return self._row_table

    # Drawing

    def __len__(self) -> int:
        return int(self._counted.sum())

    @property
    def maybe_empty(self) -> bool:
        return not len(self) if self._waits else self.is_empty

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        drawn = self._uniform_index.draw(count, random)
        slots = drawn[0]
        version = self._version_of(slots)
        self._drawn = None if version is None else (slots, drawn, version)
        return slots

    def tree(self) -> PriorityTree:
        if self._tree is None:
            self._tree = priority_tree(self.ring.size + 1, self.device, self.allocator)
        return self._tree

    def mark(self, mass: float | torch.Tensor) -> None:
        slots, changed = self.changed_slots()
        # A tensor: between two numbers torch would choose float32, where 1e308 is infinite and 1e-308 is zero.
        if not isinstance(mass, torch.Tensor):
            mass = torch.full((), mass, dtype=torch.float64, device=slots.device)
        masses = mass * (self.ring.kind_at(slots) == TRANSITION)
        if changed is not None:  # the leaf after all slots is nowhere
            slots, masses = torch.where(changed, slots, self.ring.size), masses * changed
        self.tree().set(slots, masses)

    # Reading

    def next_and_ids(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.stores_next_obs:
            return super().next_and_ids(slots)
        rows = self._entries_of(slots)
        if rows is None:
            rows = self._table_of_rows().index_select(1, slots)
        return rows[:2], rows[2]

    # Naming

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        drawn = self._entries_of(slots)
        return self.ring.id_of(slots) if drawn is None else drawn[-1]

    def _entries_of(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The entries of the queues that these slots were drawn with; None if they were not."""
        if self._drawn is None or self._drawn[0] is not slots or self._version_of(slots) != self._drawn[2]:
            return None  # a sampler may have put others in their place
        return self._drawn[1]

    @staticmethod
    def _version_of(slots: torch.Tensor) -> int | None:
        """How often slots were written to, where torch counts it."""
        return None if slots.is_inference() else slots._version

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        at = ids % self.ring.size
        slots = at.masked_fill(self._table_of_rows()[2].index_select(0, at) != ids, -1)
        # Elsewhere than on the host an id is taken on trust: looking would be a synchronisation.
        if self._waits and ((slots.numpy() < 0) | (ids.numpy() < 0)).any():
            _, never = self.ring.locate(ids)
            if never.any():
                raise never_issued(ids, int(never.nonzero()[0]))
        return slots

    # Verifying

    def check(self) -> None:
        super().check()
        if not self.rows.has_values:
            return
        ring = self.ring
        self._check_is_empty(bool((ring.head > ring.floor).any()))
        self._uniform_index.check()
        if self._row_table is not None:
            require_all(self._row_table[2] == ring.ids(), "ids of slots", "the ids of the rows", self._row_table[2])

    def _check_is_empty(self, written: bool) -> None:
        require(self.is_empty != written, "is_empty", f"{not written}, as the heads show", self.is_empty)


_LAST = 2**63 - 1


class UniformIndex:
    """The place of the j-th transition of each environment: a draw is one number below the count of all transitions.

    Made by the first draw and then kept up by writes, so that neither looks at all slots.
    """

    def __init__(self, ring: Ring, *, in_order: bool) -> None:
        self._ring, self._in_order = ring, in_order
        self._entries: torch.Tensor | None = None
        """Slot, following slot and id [3, S·N] of the j-th transition of environment e, at (j mod S) · N + e.

        Where rows are in no order, there is no following slot.
        """
        self._ends = self._starts = self._bounds = self._total = torch.empty(0, device="cpu")

    def forget(self) -> None:
        """The rows are others: look at all of them before the next draw."""
        self._entries = None

    def follow(self, steps: list[Written]) -> None:
        """Enter the rows that were written; the ring has counted those that left."""
        if self._entries is None:
            return
        size, num_envs = self._ring.size, self._ring.num_envs
        for step in steps:
            ends = self._ends if step.envs is None else self._ends[step.envs]
            self._entries.index_copy_(1, ends % size, torch.cat([step.slots, step.ids[:1]]))
            # A row that only resets is in the queue's next place, which the next row takes.
            grown = num_envs if step.is_reset is None else (~step.is_reset).long() * num_envs
            if step.envs is None:
                self._ends += grown
            else:
                self._ends[step.envs] = ends + grown
        self._add_up()

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        """Entries of transitions [3, count], uniformly and with replacement."""
        if self._entries is None:
            self._entries = self._make_entries()
            self._add_up()
        number = random.integers(count, self._ring.kind.device) % self._total
        env = torch.searchsorted(self._bounds, number, right=True)
        places = torch.add(self._starts.index_select(0, env), number, alpha=self._ring.num_envs)
        return self._entries.index_select(1, places % self._ring.size)

    def _add_up(self) -> None:
        counts = self._ring.count.cumsum(0)
        self._bounds = counts[:-1]  # without the last, so that a number is of some environment, even if none has rows
        self._total = counts[-1].clamp(min=1)
        self._starts = torch.sub(self._ends, counts, alpha=self._ring.num_envs)

    @torch.inference_mode(False)  # writes change it later, in whatever mode
    def _make_entries(self) -> torch.Tensor:
        ring = self._ring
        self._ends = torch.add(ring.first_ids[0], ring.count, alpha=ring.num_envs)
        ids = ring.ids().view(ring.slots, -1)
        ids = ids.masked_fill_(ids < 0, _LAST).sort(0).values
        slots = ids % ring.size
        entry = (slots, ring.after(slots), ids) if self._in_order else (slots, ids)
        return torch.stack(entry).view(len(entry), -1)

    def check(self) -> None:
        """Every queue holds the transitions of its environment, the oldest first."""
        if self._entries is None:
            return
        ring, fresh = self._ring, UniformIndex(self._ring, in_order=self._in_order)
        fresh._entries = fresh._make_entries()
        number = torch.arange(ring.slots, device=ring.kind.device).unsqueeze(1)
        first = self._ends - ring.count * ring.num_envs
        places = (first + number * ring.num_envs) % ring.size
        expected = fresh._entries.view(-1, ring.slots, ring.num_envs)
        right = (self._entries[:, places] == expected).all(0) | (number >= ring.count)
        require_all(right, "queue", "the transitions of its environment", self._entries[-1][places])
        drawable = (ring.kind == TRANSITION).sum()
        require_all(self._total == drawable.clamp(min=1), "queue", "as many as there are transitions", self._total)


class Written(NamedTuple):
    """One step that was written: its rows and, where next observations are shared, the rows after them."""

    envs: torch.Tensor | None
    """The environments that stepped; None: all."""
    ids: torch.Tensor
    """[2, K], or [1, K] where next observations are stored."""
    slots: torch.Tensor
    """The slots of `ids`; those of the rows after hold no transition."""
    is_reset: torch.Tensor | None
    """Mask of dummy steps, which are no transitions [K]; None: none."""
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
        rows: RowStorage,
        leaves: tuple[torch.Tensor, ...],
        nexts: tuple[torch.Tensor, ...],
        envs: torch.Tensor | None,
        blocks: bool,
        *,
        counts: bool,
    ) -> None:
        self._rows, self._ring, self._envs = rows, rows.ring, envs
        self._counts, self.counted = counts, ContinuityStats()
        ids = self._ring.first_ids[:1] if rows.stores_next_obs else self._ring.first_ids
        self._first_ids = ids if envs is None else ids[:, envs]
        self._steps, self._next_steps = ([self._lifted(leaf, blocks) for leaf in group] for group in (leaves, nexts))
        ring, self._kind, self._first = self._ring, self._ring.kind.view(-1), self._ring.first.view(-1)
        self._own = (ring.head, ring.open, ring.resetting, ring.count)
        """The state of these environments in the ring: its own tensors, or copies that are put back at the end."""
        if envs is not None:
            self._own = tuple(each[envs] for each in self._own)
        self._head, self._open, self._resetting, self._count = self._own
        self._written: list[Written] = []
        """The steps that are stored."""
        self._coming: tuple[Written, Changes, ContinuityStats] | None = None
        """The step that is being stored, its assignments, and how it is joined."""
        # Only the stacks of a later step of a block can be refused when something has been written already.
        undone = rows.stacked and blocks and rows.device.type == "cpu"
        undo = (*self._own, ring.kind, ring.first, *rows.leaves) if undone else ()
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
        return leaf if self._rows.leading_shape else leaf.unsqueeze(1)

    def _planned(
        self, leaves: list[torch.Tensor], nexts: list[torch.Tensor]
    ) -> tuple[Written, Changes, ContinuityStats]:
        """One step as it will be stored, the assignments that store it, and what it adds to `counted`."""
        rows, ring, changes = self._rows, self._ring, Changes()
        counted = ContinuityStats()
        if self._counts:
            obs, env = [leaves[i] for i in rows.obs_leaves], self._first_ids[0]
            counted = step_continuity(rows, obs, env, self._head, self._open, self._resetting)
            rewards = (leaves[i] for i in rows.schema.leaf_indices["reward"])
            infinite = any(x.is_floating_point() and not _is_finite(x) for x in rewards)
            counted += ContinuityStats(infinite=int(infinite))
        reset = self._resetting.clone() if rows.next_step else None
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
        terminated, truncated = (leaves[rows.schema.leaf_indices[name][0]] for name in ("terminated", "truncated"))
        end = terminated | truncated
        if rows.stores_next_obs:
            for column, leaf in zip(rows.next_leaves, nexts, strict=True):
                changes.add(bits_of(column.flatten(0, 1)).index_copy_, 0, slots[0], bits_of(leaf))
            changes.add(torch.add, head, 1, out=self._head)
        else:
            self._write_next(nexts, slots[1], head, reset, None if rows.next_step else end, changes)
        if reset is not None:
            changes.add(self._resetting.copy_, end & ~reset)
        return Written(self._envs, ids, slots, reset, left), changes, counted

    def _continuing(
        self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], pending: torch.Tensor, reset: torch.Tensor | None,
        changes: Changes,
    ) -> torch.Tensor:  # fmt: skip
        """Mask of steps that start from the pending observations, or reset there; heads pass those of the others."""
        rows = self._rows
        same = self._open
        for i in rows.obs_leaves if not rows.stores_next_obs else ():
            same = same & _equal_bits(rows.bits_at(i, pending), leaves[i])
        if rows.stacked:
            self._check_stacks(leaves, nexts, same, reset, changes)
        return same if reset is None else same | (self._open & reset)

    def _retire(
        self, ids: torch.Tensor, slots: torch.Tensor, changes: Changes
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Mark the transitions that leave the window as rows enter it, where they stay as history; count the others."""
        ring = self._ring
        stay = ring.slots > ring.num_sampleable
        leaving = ((ids - ring.num_sampleable * ring.num_envs) % ring.size if stay else slots).view(-1)
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
        rows = self._rows
        for i, (column, leaf) in enumerate(zip(rows.leaves, leaves, strict=True)):
            flat, kept = bits_of(column.flatten(0, 1)), bits_of(self._stored_part(i, leaf))
            if reset is not None and i in rows.obs_leaves:  # of a reset, what the step before led to
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
        rows = self._rows
        for i, leaf in zip(rows.obs_leaves, nexts, strict=True):
            flat = bits_of(rows.leaves[i].flatten(0, 1))
            changes.add(flat.index_copy_, 0, slots, bits_of(self._stored_part(i, leaf)))
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
        rows = self._rows
        broken = rows.num_invalid_stacks
        reset = torch.zeros_like(same) if reset is None else reset
        for place, i in enumerate(rows.obs_leaves):
            field = rows.schema.fields[i]
            if not isinstance(field, Stacked):
                continue
            stack, follower = (group.movedim(1 + field.axis, 1) for group in (leaves[i], nexts[place]))
            padding = stack[:, -1:] if field.pad == "repeat" else torch.zeros_like(stack[:, -1:])
            bad = ~(same | reset | _equal_bits(stack[:, :-1], padding.expand_as(stack[:, :-1])))
            bad_next = ~(reset | _equal_bits(follower[:, :-1], stack[:, 1:]))
            if rows.device.type != "cpu":
                broken = broken + (bad | bad_next).sum()
            elif bad.any():
                raise rows.unstackable(i)
            elif bad_next.any():
                raise rows.unstackable(len(rows.leaves) + place)
        if broken is not rows.num_invalid_stacks:
            changes.add(rows.num_invalid_stacks.copy_, broken)

    def _stored_part(self, column: int, leaf: torch.Tensor) -> torch.Tensor:
        """The stored part of a leaf: all of it, or the newest frame of a stack."""
        field = self._rows.schema.fields[column]
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
