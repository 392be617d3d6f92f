"""Rows on CUDA and ROCm devices, written, drawn and read by Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from relive import lazy
from relive.kernels import complete
from relive.kernels.priority import PriorityTree
from relive.kernels.triton.draw import RowDrawer, sum_counts_by_group
from relive.kernels.triton.priority_tree import TritonTree
from relive.kernels.triton.read import AT_FIRST, AT_LAST, AT_NEXT, AT_ROW, RowReader, Source
from relive.kernels.triton.rings import MAX_COLUMNS, FrameLayout, Leaf, Rings
from relive.kernels.triton.stream import DeviceStream
from relive.kernels.triton.windows import MAX_STEPS, Windows, find_windows
from relive.kernels.triton.write import GROUPS, StepWriter
from relive.replay.backend import ChangedSlots
from relive.replay.read_plan import (
    DISCOUNT,
    INDEX,
    IS_FIRST,
    MASK,
    STEP_INDEX,
    TRAIN,
    WEIGHT,
    Leaves,
    PlanReader,
    ReadAnchor,
    ReadLayout,
    ReadPlan,
)
from relive.replay.row_storage import RowStorage
from relive.replay.samplers.prioritized import is_capturing_graph
from relive.replay.torch_backend import DeviceBackend
from relive.schema.assembly import assemble_batch
from relive.schema.fields import Field, Stacked
from relive.schema.invariants import verify_elements


class TritonBackend(DeviceBackend):
    """Writes and reads rows with Triton kernels: one launch per write of any number of steps, two per uniform sample.

    Writes, draws and reads do not synchronise. Plans without a kernel are read with torch ops. Under Triton's
    interpreter, host memory is treated like a device. With the same seed, draws equal those of Triton on any device and
    differ from other backends.
    """

    def __init__(self, rows: RowStorage) -> None:
        super().__init__(rows)
        self._rings = rings = make_ring_arguments(rows)
        self._totals = sum_counts_by_group(rows.ring.count)
        """Number of transitions per group of environments, for draws; updated by writes."""
        self._drawer = RowDrawer(rings, self._totals)
        self._may_be_replayed = False
        """Whether a write was captured in a CUDA graph: replays add rows without a call on the host."""
        leaves, next_leaves = make_leaf_arguments(rows)
        other_leaves = [i for i in range(len(leaves)) if i not in rows.obs_leaves]
        self._groups = rows.obs_leaves, other_leaves
        """Indices of the observation's leaves, and of all other leaves."""
        obs, other_leaf_tensors = ([leaves[i] for i in which] for which in self._groups)
        terminated, truncated = (
            other_leaves.index(self.schema.leaf_indices[name][0]) for name in ("terminated", "truncated")
        )
        self._writer = StepWriter(
            rings, obs, next_leaves, other_leaf_tensors, self._totals, (rows.num_invalid_stacks, rows.unknown_envs),
            flags=(terminated, truncated), next_step=rows.next_step,
        )  # fmt: skip
        self._tracks_changes = False
        self._changed_slots: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(
        self, leaves: tuple[Any, ...], next_leaves: tuple[Any, ...], envs: torch.Tensor | None,
        steps: int | None = None, on_complete: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        count = 1 if steps is None else steps
        self._reserve_ids(count)
        if envs is not None or steps is not None or not self.rows.can_store_directly(leaves, next_leaves):
            leaves, next_leaves = self.rows.convert_step(leaves, next_leaves, envs, steps)
        writers = self.num_envs if envs is None else len(envs)
        obs, others = (tuple([leaves[i] for i in which]) for which in self._groups)
        changed_slots = self._reserve_changed_slots(count * GROUPS.value * writers) if self._tracks_changes else None
        self._writer.write(obs, next_leaves, others, writers, count, envs, changed_slots)
        self.is_empty = False
        self._may_be_replayed |= is_capturing_graph(self.device)
        if on_complete is not None:
            complete(on_complete)

    def _reserve_changed_slots(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tensors for the slots that a write changes; writes of the same size reuse them."""
        if self._changed_slots is None or len(self._changed_slots[0]) != count:
            slots = torch.empty(count, dtype=torch.int64, device=self.device)
            self._changed_slots = slots, torch.empty_like(slots, dtype=torch.bool)
        return self._changed_slots

    def track_changes(self) -> None:
        self._tracks_changes = True

    def changed_slots(self) -> ChangedSlots:
        assert self._changed_slots is not None
        return self._changed_slots

    def clear(self) -> None:
        super().clear()
        self._totals.zero_()

    def rebuild_caches(self) -> None:
        super().rebuild_caches()
        self._totals.copy_(sum_counts_by_group(self.ring.count))

    @property
    def may_be_empty(self) -> bool:
        if not (self.is_empty and self._may_be_replayed):
            return self.is_empty
        return not is_capturing_graph(self.device) and not len(self)

    def make_random(self, seed: int | None) -> DeviceStream:
        return DeviceStream(seed, self.device)

    def draw(self, count: int, random: Any) -> torch.Tensor:
        return self._drawer.draw(random.numbers, count)

    def _make_tree(self, num_leaves: int) -> PriorityTree:
        return TritonTree(num_leaves, self.device)

    def make_reader(self, plan: ReadPlan) -> PlanReader:
        return TritonReader(self, plan) if has_kernels(plan) else super().make_reader(plan)

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the slots of rows by id; -1 also for ids that were never issued, because raising would synchronise."""
        return self.ring.locate(ids)[0]

    def check(self) -> None:
        super().check()
        expected = sum_counts_by_group(self.ring.count)
        verify_elements(self._totals == expected, "totals of groups", "the sums of counts", self._totals)

    def _check_is_empty(self, has_rows: bool) -> None:
        if not self._may_be_replayed:
            super()._check_is_empty(has_rows)


_ANCHORS = {ReadAnchor.ROW: AT_ROW, ReadAnchor.LAST: AT_LAST, ReadAnchor.NEXT: AT_NEXT, ReadAnchor.FIRST: AT_FIRST}


def make_ring_arguments(rows: RowStorage) -> Rings:
    ring = rows.ring
    first, is_open, resetting = (flags.view(torch.uint8) for flags in (ring.first, ring.open, ring.resetting))
    return Rings(
        ring.kind,
        first,
        ring.head,
        is_open,
        resetting,
        ring.count,
        ring.floor,
        ring.slots,
        ring.num_envs,
        ring.num_sampleable,
    )


def make_leaf_arguments(rows: RowStorage) -> tuple[list[Leaf], list[Leaf]]:
    """Return all leaves, and the explicitly stored next observations, as arguments of kernels."""
    frames = [_make_frames(field) for field in rows.schema.fields]
    leaves = [
        Leaf.from_column(leaf, frame_layout, MAX_COLUMNS)
        for leaf, frame_layout in zip(rows.leaves, frames, strict=True)
    ]
    return leaves, [Leaf.from_column(leaf, FrameLayout(), MAX_COLUMNS) for leaf in rows.next_leaves]


def _make_frames(field: Field) -> FrameLayout:
    if not isinstance(field, Stacked):
        return FrameLayout()
    return FrameLayout(field.k, torch.Size(field.shape[field.axis :]).numel(), field.pad == "zero")


def has_kernels(plan: ReadPlan) -> bool:
    """Whether the kernels can read this plan. Plans with offsets that are not packed need torch ops."""
    is_packed = plan.layout is ReadLayout.PACKED
    return plan.num_steps <= MAX_STEPS and (is_packed or all(group.offsets is None for group in plan.groups))


class TritonReader(PlanReader):
    """Reads batches of one plan into reserved tensors."""

    def __init__(self, backend: TritonBackend, plan: ReadPlan) -> None:
        super().__init__(backend, plan)
        rows, self._rings = backend.rows, make_ring_arguments(backend.rows)
        leaves, next_leaves = make_leaf_arguments(rows)
        copied_reads = [read for read in plan.reads if read.group.anchor is not ReadAnchor.SUM]
        summed = [read for read in plan.reads if read.group.anchor is ReadAnchor.SUM]
        self._copied_paths, self._summed_paths = ([read.path for read in reads] for reads in (copied_reads, summed))
        sources = [
            Source(next_leaves[rows.obs_leaves.index(read.leaf)], AT_ROW.value)
            if next_leaves and read.group.anchor is ReadAnchor.NEXT
            else Source(leaves[read.leaf], _ANCHORS[read.group.anchor].value)
            for read in copied_reads
        ]
        rewards = [(rows.leaves[read.leaf].view(-1), leaves[read.leaf].layout) for read in summed]
        self._reader = RowReader(self._rings, sources, rewards)

    def reserve_batch(self, count: int) -> Leaves:
        forms, device = self.plan.leaf_specs(self._backend.schema, count), self._backend.device
        return {path: torch.empty(shape, dtype=dtype, device=device) for path, (shape, dtype) in forms.items()}

    def fill_batch(self, reserved_batch: Leaves, slots: torch.Tensor, weight: torch.Tensor | None) -> lazy.TensorDict:
        self.read_into(reserved_batch, slots)
        if weight is not None:
            reserved_batch[WEIGHT] = weight
        return assemble_batch(reserved_batch, slots.shape)

    def read(self, slots: torch.Tensor) -> Leaves:
        leaves = self.reserve_batch(len(slots))
        self.read_into(leaves, slots)
        return leaves

    def read_into(self, targets: Leaves, slots: torch.Tensor) -> None:
        """Read rows directly into `targets`, because a captured CUDA graph writes to these addresses again."""
        copied, plan = [targets[path] for path in self._copied_paths], self.plan
        if plan.layout is ReadLayout.PACKED:
            windows = self._find_windows(targets, slots)
            self._reader.read(windows, copied, length=plan.num_steps)
        elif plan.n:
            sums, discount = [targets[path].view(-1) for path in self._summed_paths], targets[DISCOUNT]
            self._reader.read(slots, copied, targets[INDEX], n=plan.n, gamma=plan.gamma, sums=sums, discount=discount)
        else:
            self._reader.read(slots, copied, targets[INDEX])

    def _find_windows(self, out: Leaves, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of packed sequences; fills the masks, "index" and "step_index" of `out`."""
        (before, after), steps = self.plan.num_steps_around, slots.new_empty((len(slots), self.plan.num_steps))
        mask, train, is_first = (out[mark].view(torch.uint8) for mark in (MASK, TRAIN, IS_FIRST))
        windows = Windows(steps, mask, train, is_first, out[INDEX])
        find_windows(self._rings, slots, before, after + 1, self.plan.cross_episodes, windows)
        if STEP_INDEX in out:
            ids = self._backend.ring.ids_at(steps.view(-1)).view(steps.shape)
            out[STEP_INDEX].copy_(torch.where(steps < 0, -1, ids))
        return steps
