"""Read plans by Triton's kernels: rows and n-step returns in one launch, sequences in two."""

from __future__ import annotations

import torch

from relive import lazy
from relive.kernels.triton.read import LAST, NEXT, OWN, START, RowReader, Source
from relive.kernels.triton.windows import MOST_STEPS, Windows, find_windows
from relive.kernels.triton.words import MOST_COLUMNS, Frames, Leaf, Rings
from relive.replay.read_plan import (
    DISCOUNT,
    INDEX,
    IS_FIRST,
    MASK,
    STEP_INDEX,
    TRAIN,
    WEIGHT,
    Anchor,
    Layout,
    ReadPlan,
)
from relive.replay.row_memory import RowMemory
from relive.replay.store import Leaves, PlanReader
from relive.schema.assembly import assemble, checked_targets
from relive.schema.fields import Field, Path, Stacked, caller_shape

Forms = dict[Path, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of every leaf of a batch, in its order."""

_PLACES = {Anchor.ROW: OWN, Anchor.LAST: LAST, Anchor.NEXT: NEXT, Anchor.FIRST: START}


def rings_of(memory: RowMemory) -> Rings:
    """The ring of a memory, as kernels see it."""
    ring = memory.ring
    first, is_open, resetting = (flags.view(torch.uint8) for flags in (ring.first, ring.open, ring.resetting))
    return Rings(
        ring.kind, first, ring.head, is_open, resetting, ring.count, ring.floor, ring.slots, ring.num_envs, ring.alive
    )


def leaves_of(memory: RowMemory) -> tuple[list[Leaf], list[Leaf]]:
    """The leaves of a memory and those of next observations, as kernels see them."""
    frames = [_frames(field) for field in memory.schema.fields]
    leaves = [Leaf.of(leaf, how, MOST_COLUMNS) for leaf, how in zip(memory.leaves, frames, strict=True)]
    return leaves, [Leaf.of(leaf, Frames(), MOST_COLUMNS) for leaf in memory.next_leaves]


def _frames(field: Field) -> Frames:
    if not isinstance(field, Stacked):
        return Frames()
    return Frames(field.k, torch.Size(field.shape[field.axis :]).numel(), field.pad == "zero")


def has_kernels(plan: ReadPlan) -> bool:
    """Whether kernels read a plan: offsets in their places are torch ops' work."""
    is_packed = plan.layout is Layout.PACKED
    return plan.length <= MOST_STEPS and (is_packed or all(group.offsets is None for group in plan.groups))


class TritonReader(PlanReader):
    """Reads batches of one plan into tensors that are there already."""

    def __init__(self, memory: RowMemory, plan: ReadPlan) -> None:
        self.plan, self._memory, self._rings = plan, memory, rings_of(memory)
        leaves, nexts = leaves_of(memory)
        copied = [read for read in plan.reads if read.group.anchor is not Anchor.SUM]
        summed = [read for read in plan.reads if read.group.anchor is Anchor.SUM]
        self._copied, self._summed = ([read.path for read in reads] for reads in (copied, summed))
        sources = [
            Source(nexts[memory.observed.index(read.leaf)], OWN.value)
            if nexts and read.group.anchor is Anchor.NEXT
            else Source(leaves[read.leaf], _PLACES[read.group.anchor].value)
            for read in copied
        ]
        rewards = [(memory.leaves[read.leaf].view(-1), leaves[read.leaf].form) for read in summed]
        self._reader = RowReader(self._rings, sources, rewards)

    def _forms(self, count: int) -> Forms:
        """The leaves of a batch of so many rows."""
        fields, steps = self._memory.schema.fields, (count, self.plan.length)
        forms: Forms = {}
        for path, leaf, group in self.plan.reads:
            lead = (count,) if group.offsets is None else steps
            forms[path] = (*lead, *caller_shape(fields[leaf])), fields[leaf].dtype
        forms[INDEX] = (count,), torch.int64
        marks = {DISCOUNT: ((count,), torch.float32), STEP_INDEX: (steps, torch.int64)}
        forms |= {path: marks.get(path, (steps, torch.bool)) for path in self.plan.paths if path not in forms}
        return forms

    def reserve(self, count: int, out: lazy.TensorDict | None, weighs: bool) -> Leaves:
        forms, device = self._forms(count), self._memory.device
        if out is None:
            return {path: torch.empty(shape, dtype=dtype, device=device) for path, (shape, dtype) in forms.items()}
        if weighs:
            forms[WEIGHT] = (count,), torch.float32
        return dict(zip(forms, checked_targets(out, forms, device), strict=True))

    def fill(
        self, reserved: Leaves, slots: torch.Tensor, weight: torch.Tensor | None, out: lazy.TensorDict | None
    ) -> lazy.TensorDict:
        """Fill reserved tensors, whose addresses stay, as a captured graph needs it."""
        self._fill(reserved, slots)
        if out is not None:
            return out
        if weight is not None:
            reserved[WEIGHT] = weight
        return assemble(reserved, slots.shape)

    def read(self, slots: torch.Tensor) -> Leaves:
        leaves = self.reserve(len(slots), None, False)
        self._fill(leaves, slots)
        return leaves

    def _fill(self, out: Leaves, slots: torch.Tensor) -> None:
        copied, plan = [out[path] for path in self._copied], self.plan
        if plan.layout is Layout.PACKED:
            windows = self._find_windows(out, slots)
            self._reader.read(windows, copied, length=plan.length)
        elif plan.n:
            sums = [out[path].view(-1) for path in self._summed]
            self._reader.read(slots, copied, out[INDEX], n=plan.n, gamma=plan.gamma, sums=sums, discount=out[DISCOUNT])
        else:
            self._reader.read(slots, copied, out[INDEX])

    def _find_windows(self, out: Leaves, slots: torch.Tensor) -> torch.Tensor:
        """The slots of packed sequences; fills their marks."""
        (before, after), steps = self.plan.reach, slots.new_empty((len(slots), self.plan.length))
        mask, train, is_first = (out[mark].view(torch.uint8) for mark in (MASK, TRAIN, IS_FIRST))
        windows = Windows(steps, mask, train, is_first, out[INDEX])
        find_windows(self._rings, slots, before, after + 1, self.plan.cross_episodes, windows)
        if STEP_INDEX in out:
            ids = self._memory.ring.id_of(steps.view(-1)).view(steps.shape)
            out[STEP_INDEX].copy_(torch.where(steps < 0, -1, ids))
        return steps
