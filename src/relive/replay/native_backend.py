"""Rows in host memory, written and read by the C++ core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from relive import kernels, lazy
from relive.errors import InvariantError, explain, verify
from relive.replay.backend import Backend, ChangedSlots, make_unissued_id_error
from relive.replay.continuity import StepContinuityStats
from relive.replay.read_plan import INDEX, WEIGHT, Leaves, PlanReader, ReadAnchor, ReadLayout, ReadPlan
from relive.replay.ring import MAX_ROWS_PER_STEP
from relive.replay.row_storage import RowStorage
from relive.rng import Randomness
from relive.schema.assembly import assemble_batch, make_assembler
from relive.schema.fields import Stacked, caller_shape

if TYPE_CHECKING:
    from relive.replay.samplers import Sampler


class NativeBackend(Backend):
    """Writes and reads rows with the C++ core, also in shared memory and on disk.

    Inputs that the core rejects are converted once and passed again.
    """

    def __init__(self, rows: RowStorage) -> None:
        super().__init__(rows)
        self.core = _make_native_ring(rows)
        """The native ring over the memory of the rows."""
        self.native = kernels.native_core()
        """The native module; later calls of `kernels.force` do not affect it."""
        self._is_valid = self.core.is_valid
        self.core.watch_cuts(rows.has_stats)
        self._reads_files = rows.row_checksums is not None
        self._is_only_process = not rows.allocator.persistent
        """Whether these rows are neither in shared memory nor in a file, so that only this process writes them."""
        self.is_shared = rows.allocator.persistent and not self._reads_files
        self._few_slots: torch.Tensor | None = None
        """Cached slots of all transitions, if there are few; None after a write."""
        self._rows_left = rows.ring.num_rows_left()

    def write(
        self, leaves: tuple[Any, ...], next_leaves: tuple[Any, ...], envs: torch.Tensor | None,
        steps: int | None = None, on_complete: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        count = 1 if steps is None else steps
        if self._rows_left < MAX_ROWS_PER_STEP * count:
            self._rows_left = self.ring.require_rows_left(count)
        self._few_slots = None
        self._rows_left -= MAX_ROWS_PER_STEP * count
        status = self.core.write(leaves, next_leaves, envs, count, steps is not None, on_complete)
        if status >= 0:
            leaves, next_leaves = self.rows.convert_step(leaves, next_leaves, envs, steps)
            status = self.core.write(leaves, next_leaves, envs, count, steps is not None, on_complete)
            if status >= 0:
                raise self.rows.make_misaligned_error(status)
        if status < -1:
            if status > self.native.LOOKS_INFINITE:
                raise self.rows.make_stack_error(-2 - status)
            self.warning = self.counter.take_next_warning(self.read_continuity_stats())

    def attach_counters(self, counters: Any) -> bool:
        self.core.attach_counters(counters)
        return True

    def rewrite(self, slots: torch.Tensor, leaves: dict[int, torch.Tensor]) -> None:
        self.core.rewrite(slots, tuple(leaves.get(i) for i in self.rows.mutable))

    def read_continuity_stats(self) -> StepContinuityStats:
        return StepContinuityStats(*self.core.continuity_counts())

    def track_changes(self) -> None:
        self.core.track_changes(True)

    def changed_slots(self) -> ChangedSlots:
        return torch.tensor(self.core.changed_slots.slots, dtype=torch.int64, device="cpu"), None

    def clear(self) -> None:
        self._few_slots = None
        super().clear()

    def rebuild_caches(self) -> None:
        self._few_slots = None
        self._rows_left = self.ring.num_rows_left()

    def __len__(self) -> int:
        return self.core.stored()

    @property
    def may_be_empty(self) -> bool:
        return not self.core.stored()

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        slots = self.core.draw(count, random.capsule)
        return self._draw_from_list(count, random) if slots is None else slots

    def _draw_from_list(self, count: int, random: Randomness) -> torch.Tensor:
        """Draw from a list of all transitions, which are too rare for the core's rejection sampling."""
        slots = self.stored() if self._few_slots is None else self._few_slots
        self._few_slots = slots if self._is_only_process else None
        shares = torch.arange(1, len(slots) + 1, dtype=torch.float64, device="cpu") / len(slots)
        return slots[torch.searchsorted(shares, random.uniform(count, slots.device), right=True)]

    def set_mass_of_written_rows(self, mass: float | torch.Tensor) -> None:
        tree: Any = self.priority_tree()
        tree.set_written_slots(self.core.changed_slots, mass)

    def make_reader(self, plan: ReadPlan) -> PlanReader:
        # The native core sums only rewards of float32 and float64, so torch ops sum rewards of other dtypes.
        summed_dtypes = (
            self.rows.leaves[read.leaf].dtype for read in plan.reads if read.group.anchor is ReadAnchor.SUM
        )
        if all(dtype in (torch.float32, torch.float64) for dtype in summed_dtypes):
            return NativeReader(self, plan)
        return super().make_reader(plan)

    def read_leaves(self, slots: torch.Tensor, leaves: Sequence[int], *, padded: bool = False) -> list[torch.Tensor]:
        self._request_pages(slots)
        return super().read_leaves(slots, leaves, padded=padded)

    def _request_pages(self, slots: torch.Tensor) -> None:
        """Ask the operating system to load the pages of rows that are read next."""
        if self._reads_files:
            self.core.fetch(slots.contiguous())

    def _rebuild_stacks(self, slots: torch.Tensor, leaf: int) -> torch.Tensor:
        out = self.rows.leaves[leaf].new_empty((len(slots), *caller_shape(self.schema.fields[leaf])))
        self.core.stack(slots, leaf, out)
        return out

    def count_following(self, slots: torch.Tensor) -> torch.Tensor:
        return self.core.count_following(slots)

    def count_preceding(self, slots: torch.Tensor) -> torch.Tensor:
        return self.core.count_preceding(slots)

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        return self.core.ids(slots)

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        slots = self.core.locate(ids)
        if isinstance(slots, int):
            raise make_unissued_id_error(ids, slots)
        return slots

    def check(self) -> None:
        super().check()
        if self._few_slots is not None:
            verify(torch.equal(self._few_slots, self.stored()), "few transitions", "those of the ring", self._few_slots)

    def recover(self) -> None:
        self.core.finish_rewrite()
        super().recover()

    def find_torn_rows(self) -> torch.Tensor:
        """Return a mask [S, N] of slots whose mutable leaves do not match their checksum."""
        is_torn = torch.zeros_like(self.ring.first)
        self.core.find_torn(is_torn)
        return is_torn

    def find_damaged_rows(self, first_rows: torch.Tensor, end_rows: torch.Tensor) -> torch.Tensor:
        """Return a mask [S, N] of rows that do not match their checksum, from `first_rows` to before `end_rows` [N]."""
        is_damaged = torch.zeros_like(self.ring.first)
        self.core.find_damaged(first_rows, end_rows, is_damaged)
        return is_damaged

    def check_row_checksums(self) -> None:
        ring = self.ring
        if not self._reads_files:
            return
        is_damaged = self.find_damaged_rows(torch.zeros_like(ring.head), ring.head + 1) | self.find_torn_rows()
        if is_damaged.any():
            slot, env = is_damaged.nonzero()[0].tolist()
            where = f"row {int(ring.row_numbers()[slot, env])}, environment {env} (slot {slot})"
            remedy = "Call clear(), or load a checkpoint: the disk has changed the row."
            got = f"other bytes (in {int(is_damaged.sum())} rows)"
            raise InvariantError(explain(where, "the bytes that were written", got, remedy))


class NativeReader(PlanReader):
    """Reads a batch of one plan in one call of the C++ core."""

    _backend: NativeBackend

    def __init__(self, backend: NativeBackend, plan: ReadPlan) -> None:
        super().__init__(backend, plan)
        self.copies_unlocked = backend.is_shared and plan.is_transition
        is_packed = plan.layout is ReadLayout.PACKED
        groups = [
            (
                int(anchor),
                counts_observations,
                mask is not None,
                None if offsets is None else list(() if is_packed else offsets),
            )
            for anchor, offsets, mask, counts_observations in plan.groups
        ]
        self._core: Any = backend.native.PlanReader(
            backend.core, [(read.leaf, plan.groups.index(read.group)) for read in plan.reads], groups, int(plan.layout),
            plan.cross_episodes, plan.step_index, *plan.num_steps_around, plan.n, plan.gamma,
        )  # fmt: skip
        self._assemble = make_assembler(plan.paths)
        self._assemble_weighted = make_assembler((*plan.paths, WEIGHT))

    def read(self, slots: torch.Tensor) -> Leaves:
        # `zip` has no `strict=True` here, because it would double the time of this loop.
        return dict(zip(self.plan.paths, self._core.read(slots)))  # noqa: B905

    def sample(self, count: int, random: Randomness) -> lazy.TensorDict | None:
        leaves = self._core.sample(count, random.capsule)
        return None if leaves is None else self._assemble(leaves, torch.Size((count,)))

    def reserve_batch(self, count: int) -> Any:
        return self._core.reserve(count)

    def fill_batch(self, reserved_batch: Any, slots: torch.Tensor, weight: torch.Tensor | None) -> lazy.TensorDict:
        leaves = self._core.fill(reserved_batch, slots)
        if weight is None:
            return self._assemble(leaves, slots.shape)
        leaves.append(weight)
        return self._assemble_weighted(leaves, slots.shape)

    def sample_unlocked(
        self, count: int, sampler: Sampler, lock: AbstractContextManager[Any]
    ) -> lazy.TensorDict | None:
        backend, reserved_batch = self._backend, self._core.reserve(count)
        with lock:
            if backend.may_be_empty:
                return None
            slots, weight = sampler.choose(count)
            # Slots may be overwritten during the copy below, so the ids are read under the lock.
            ids = backend.ids(slots)
        leaves = self._read_without_lock(reserved_batch, slots)
        with lock:
            if not backend.core.holds(slots, ids):
                return None
            # Mutable leaves may be rewritten during the copy without the lock, so they are read again under the lock.
            mutable = backend.rows.mutable
            if mutable:
                paths = (backend.schema.paths[i] for i in mutable)
                leaves |= zip(paths, backend.read_leaves(slots, mutable), strict=True)
        leaves[INDEX] = ids
        if weight is not None:
            leaves[WEIGHT] = weight
        return assemble_batch(leaves, slots.shape)

    def _read_without_lock(self, reserved_batch: Any, slots: torch.Tensor) -> Leaves:
        return dict(zip(self.plan.paths, self._core.fill(reserved_batch, slots), strict=True))


def _make_native_ring(rows: RowStorage) -> Any:
    """Return the native ring over the memory of these rows."""
    schema, ring = rows.schema, rows.ring
    stacks = [(f.k, f.axis, f.pad == "repeat") if isinstance(f, Stacked) else None for f in schema.fields]
    state = {
        **ring.state, "journal": ring.journal, "row_checksums": rows.row_checksums,
        "rewrite_journal": rows.rewrite_journal, "rewrite_checksums": rows.mutable_checksums,
    }  # fmt: skip
    return kernels.native_core().RingMemory(
        list(rows.leaves),
        stacks,
        list(rows.obs_leaves),
        list(rows.next_leaves),
        list(rows.mutable),
        state,
        ring.num_sampleable,
        rows.next_step,
        rows.same_step,
        not rows.leading_shape,
        *(schema.leaf_indices[name][0] for name in ("reward", "terminated", "truncated")),
    )
