"""The interface between a replay buffer and the kernels of its device: one backend per device, chosen at construction.

Terms: a *row* is one step of one environment; its number never changes. A *slot* is the place that stores it; its flat
number is slot · num_envs + environment. An *id* ("index" in a batch) is row · num_envs + environment. A *leaf* is one
tensor of the schema; a *field* is what the user declared. -1 means no slot; reads with `padded` return zeros for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from relive.errors import explain
from relive.kernels.priority import PriorityTree, make_priority_tree
from relive.kernels.reader import ItemReader, make_reader
from relive.replay.continuity import StepContinuityCounter, StepContinuityStats, count_stored_continuity
from relive.replay.invariants import check_kernels, check_rows
from relive.replay.read_plan import PlanReader, ReadPlan
from relive.replay.row_storage import RowStorage
from relive.replay.torch_reader import TorchReader
from relive.rng import Randomness

ChangedSlots = tuple[torch.Tensor, torch.Tensor | None]
"""Slots of a write, and a mask of the slots that changed (None: all changed)."""


class Backend:
    """Writes, draws and reads the rows of a replay buffer; samplers get it as their `storage`.

    All tensors are on `device`. Methods do not synchronise with the device unless their docstring says so.
    """

    def __init__(self, rows: RowStorage) -> None:
        self.rows = rows
        """The stored rows: a tensor per leaf."""
        self.ring = rows.ring
        """The kind of row in each slot, and the arithmetic of slots and ids."""
        self.allocator, self.schema, self.device = rows.allocator, rows.schema, rows.device
        self.num_envs = rows.ring.num_envs
        self.stores_next_obs = rows.stores_next_obs
        """Whether next observations are stored explicitly. Rows then have no order: only transitions can be read."""
        self.warning: str | None = None
        """Warning to issue about written steps that look like a mistake; None without one."""
        self.counter = StepContinuityCounter()
        """Counts of the steps that this object has written, for warnings."""
        self._readers: dict[Any, ItemReader] = {}
        self._tree: PriorityTree | None = None
        self._is_valid: Callable[[], bool] | None = None
        """Fast check of all invariants of the ring; finds a violation but does not explain it."""

    def write(
        self, leaves: tuple[Any, ...], next_leaves: tuple[Any, ...], envs: torch.Tensor | None,
        steps: int | None = None, on_complete: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Write a step, or a block of `steps` steps in time order, of all environments or of `envs`.

        A write that raises stores nothing. `on_complete` is called after the rows are written, even if a signal
        interrupts the write (see `kernels.complete`).
        """
        raise NotImplementedError

    def attach_counters(self, counters: Any) -> bool:
        """Make every write update these native counters; returns False if this backend cannot."""
        return False

    def rewrite(self, slots: torch.Tensor, leaves: dict[int, torch.Tensor]) -> None:
        """Overwrite mutable leaves at K > 0 slots [K]; slot -1 is skipped, and the last value for a slot is used."""
        raise NotImplementedError

    def track_changes(self) -> None:
        """Make later writes record their slots for `changed_slots`."""

    def changed_slots(self) -> ChangedSlots:
        """Return the slots where the last write added or removed a transition, in order."""
        raise NotImplementedError

    def read_continuity_stats(self) -> StepContinuityStats:
        """Return the continuity statistics of the steps written by this object."""
        return self.counter.stats

    def end_episodes(self, envs: torch.Tensor | None, on_complete: Callable[[], None]) -> None:
        """End the current episodes of these environments, or of all; then call `on_complete`."""
        self.ring.end_episodes(envs, on_complete)

    def clear(self) -> None:
        """Delete every row. Idempotent."""
        self.ring.clear()

    def rebuild_caches(self) -> None:
        """Rebuild host-side caches after rows changed without `write`."""

    def recover(self) -> None:
        """Restore a valid ring after a process died while it held the lock."""
        self.ring.recover()

    def find_row_warnings(self) -> Iterator[str]:
        """Yield warnings about stored rows, unless writes are counted."""
        if not self.counter.is_on and self.rows.has_values:
            stats = count_stored_continuity(self.rows)
            while (message := self.counter.take_next_warning(stats)) is not None:
                yield message

    def __len__(self) -> int:
        """Return the number of rows that can be drawn. Synchronises."""
        raise NotImplementedError

    @property
    def may_be_empty(self) -> bool:
        """Whether no row can be drawn. On a device this is what the host knows without synchronising."""
        return not len(self)

    def make_random(self, seed: int | None) -> Randomness:
        """Make the random number generator that `draw` uses."""
        return Randomness(seed)

    def draw(self, count: int, random: Any) -> torch.Tensor:
        """Draw slots [count] uniformly, with replacement. At least one row must be stored."""
        raise NotImplementedError

    def priority_tree(self) -> PriorityTree:
        """Return the sum tree of priorities: one leaf per slot, initially zero, and one unused leaf after them."""
        if self._tree is None:
            self._tree = self._make_tree(self.num_slots + 1)
        return self._tree

    def _make_tree(self, num_leaves: int) -> PriorityTree:
        return make_priority_tree(num_leaves, self.device, self.allocator)

    def set_mass_of_written_rows(self, mass: float | torch.Tensor) -> None:
        """Set the mass in the priority tree of all transitions that the last write added, and 0 for removed ones."""
        raise NotImplementedError

    def make_reader(self, plan: ReadPlan) -> PlanReader:
        """Make a reader of batches of this plan. Cache the reader: making it takes longer than reading a batch."""
        return TorchReader(self, plan)

    def read_leaves(self, slots: torch.Tensor, leaves: Sequence[int], *, padded: bool = False) -> list[torch.Tensor]:
        """Read the leaves with these indices at slots; with `padded`, slot -1 gives zeros."""
        unstacked = tuple(i for i in leaves if i not in self.rows.stacked)
        tensors = self._gather_leaves(self.rows.leaves, unstacked, slots, padded)
        if len(unstacked) == len(leaves):
            return tensors
        tensor_by_leaf = dict(zip(unstacked, tensors, strict=True))
        return [tensor_by_leaf[i] if i in tensor_by_leaf else self._rebuild_stacks(slots, i) for i in leaves]

    def read_next_leaves(self, slots: torch.Tensor, leaves: Sequence[int]) -> list[torch.Tensor]:
        """Read the next observations at slots, which must be stored explicitly; `leaves` are indices in the schema."""
        indices = tuple(self.rows.obs_leaves.index(leaf) for leaf in leaves)
        return self._gather_leaves(self.rows.next_leaves, indices, slots, padded=False)

    def find_next_and_ids(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots and the slots after them [2, B], and the ids of the rows.

        If next observations are stored explicitly, the slots after them are omitted [1, B].
        """
        row_slots = slots.unsqueeze(0) if self.stores_next_obs else torch.stack([slots, self.ring.shift(slots)])
        return row_slots, self.ids(slots)

    def _gather_leaves(
        self, tensors: tuple[torch.Tensor, ...], indices: tuple[int, ...], slots: torch.Tensor, padded: bool
    ) -> list[torch.Tensor]:
        key = (tensors is self.rows.leaves, indices)
        leaf_reader = self._readers.get(key)
        if leaf_reader is None:
            leaf_reader = self._readers[key] = make_reader([tensors[i] for i in indices], 2, self.ring.size)
        return leaf_reader.take(slots, 0, len(slots), padded)

    def _rebuild_stacks(self, slots: torch.Tensor, leaf: int) -> torch.Tensor:
        return self.rows.rebuild_stacks(leaf, slots)

    def count_preceding(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the number of transitions of the same episode before each row."""
        return self.ring.count_preceding(slots)

    def count_following(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the number of transitions of the same episode after each row."""
        return self.ring.count_following(slots)

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the ids of the rows at slots."""
        return self.ring.ids_at(slots)

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the slots of rows by id, -1 for overwritten rows; raises an IndexError for ids never issued."""
        raise NotImplementedError

    def stored(self) -> torch.Tensor:
        """Return the slots of all rows that can be drawn. Synchronises."""
        return self.ring.transition_slots()

    @property
    def num_slots(self) -> int:
        """Number of flat slots."""
        return self.ring.size

    def allocate(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeros [num_slots] in the kind of memory that holds the rows."""
        return self.allocator.allocate(f"sampler.{name}", (self.num_slots,), dtype)

    def check(self) -> None:
        """Verify every invariant of the rows and of this backend's caches; changes nothing."""
        check_rows(self.rows, self._is_valid)
        if self.rows.has_values:
            check_kernels(self)

    def check_row_checksums(self) -> None:
        """Verify the checksums of all rows, if there are any."""


def make_unissued_id_error(ids: torch.Tensor, position: int) -> IndexError:
    """Make the IndexError for the id at position `position`, which was never issued."""
    remedy = "Pass ids from batch['index']."
    if int(ids[position]) == -1:
        remedy = "-1 pads batch['step_index']: pass it in its shape [B, L], or select by batch['mask']."
    return IndexError(explain(f"index[{position}]", "the id of a stored transition", int(ids[position]), remedy))
