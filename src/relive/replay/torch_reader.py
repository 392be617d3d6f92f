"""Reads batches with torch ops on every device, and computes the batch of a view that changes steps first."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from relive.kernels.torch_ops import add_axes, cached_arange, run_end_offsets, sum_n_step_rewards
from relive.replay.read_plan import (
    DISCOUNT,
    INDEX,
    IS_FIRST,
    MASK,
    STEP_INDEX,
    TRAIN,
    Leaves,
    PlanReader,
    ReadAnchor,
    ReadGroup,
    ReadLayout,
    ReadPlan,
    make_next_obs_path,
)
from relive.schema.conversion import as_indexable
from relive.schema.fields import Path

if TYPE_CHECKING:
    from relive.replay.backend import Backend


class EpisodeExtent(NamedTuple):
    """Number of stored steps before and after each row [B] in its episode, limited to the offsets of the plan."""

    preceding: torch.Tensor
    following: torch.Tensor
    last: torch.Tensor | None
    """Distance from each row to the last of its n steps; None if each row is its own last step."""


def find_missing_steps(is_no_step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask [n, B] that is True from the first missing step on, and the number of missing steps [B]."""
    is_over = is_no_step.cummax(0).values
    return is_over, is_over.sum(0)


_ANCHOR_PLACES = {ReadAnchor.ROW: 0, ReadAnchor.FIRST: 0, ReadAnchor.NEXT: 1, ReadAnchor.LAST: 2}
"""Index of each anchor in `run_end_offsets`."""


class TorchReader(PlanReader):
    """Reads batches of one plan; the number of launches does not depend on the number of offsets."""

    def __init__(self, backend: Backend, plan: ReadPlan) -> None:
        super().__init__(backend, plan)
        self._summed = {read.leaf: read.path for read in plan.reads if read.group.anchor is ReadAnchor.SUM}
        self._windows = {group: _find_leaf_paths(plan, group) for group in plan.groups if group.offsets is not None}
        items = [group for group in plan.groups if group.offsets is None and group.anchor is not ReadAnchor.SUM]
        self._items = {group.anchor: _find_leaf_paths(plan, group) for group in items}
        rows, next_items = (self._items.get(anchor, {}) for anchor in (ReadAnchor.ROW, ReadAnchor.NEXT))
        shared_leaves = [] if backend.stores_next_obs else [leaf for leaf in rows if leaf in next_items]
        self._shared_leaves = {leaf: (rows.pop(leaf), next_items.pop(leaf)) for leaf in shared_leaves}
        """Leaves of a row and of its next observation, which one call reads."""

    def read(self, slots: torch.Tensor) -> Leaves:
        batch = self._read_sequences(slots) if self.plan.layout is ReadLayout.PACKED else self._read_rows(slots)
        return {path: batch[path] for path in self.plan.paths}

    def _read_rows(self, slots: torch.Tensor) -> Leaves:
        backend, plan = self._backend, self.plan
        batch: Leaves = {}
        missing, places = None, _ANCHOR_PLACES
        if plan.n:
            at, missing = self._read_sums(slots, batch)
        else:
            at, batch[INDEX] = backend.find_next_and_ids(slots)
            places = _ANCHOR_PLACES | {ReadAnchor.LAST: 0}
        if self._shared_leaves:
            read = backend.read_leaves(at[:2].view(-1), tuple(self._shared_leaves))
            for (path, next_obs_path), leaf in zip(self._shared_leaves.values(), read, strict=True):
                row_and_next = leaf.view(2, len(slots), *leaf.shape[1:])
                # The next observation is copied: an in-place change of it must not invalidate gradients of `obs`.
                batch[path], batch[next_obs_path] = row_and_next[0], row_and_next[1].clone()
        for anchor, leaves in self._items.items():
            if anchor is ReadAnchor.NEXT and backend.stores_next_obs:
                batch |= zip(leaves.values(), backend.read_next_leaves(slots, tuple(leaves)), strict=True)
            elif leaves:
                batch |= zip(leaves.values(), backend.read_leaves(at[places[anchor]], tuple(leaves)), strict=True)
        if self._windows:
            last = None if missing is None else plan.n - 1 - missing
            batch |= self._read_offsets(
                slots, EpisodeExtent(*backend.ring.count_neighbors(slots, *plan.num_steps_around), last)
            )
        return batch

    def _read_sums(self, slots: torch.Tensor, leaves: Leaves) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ids, sums and discounts to `leaves`.

        Returns the slots of the rows, their next observations and their last steps [3, B], and the number of missing
        steps [B].
        """
        backend, n = self._backend, self.plan.n
        leaves[INDEX] = ids = backend.ids(slots)
        run, is_no_step = backend.ring.following_slots(ids, n)
        is_over, missing = find_missing_steps(is_no_step)
        rewards = backend.read_leaves(run[:-1].reshape(-1), tuple(self._summed)) if self._summed else []
        rewards = [leaf.view(*is_over.shape, *leaf.shape[1:]) for leaf in rewards]
        sums, leaves[DISCOUNT] = sum_n_step_rewards(rewards, is_over, missing, self.plan.gamma)
        leaves |= zip(self._summed.values(), sums, strict=True)
        places, shifts_per_missing_step = run_end_offsets(n, slots.device)
        return run.gather(0, torch.addcmul(places, shifts_per_missing_step, missing)), missing

    def _read_offsets(self, slots: torch.Tensor, extent: EpisodeExtent) -> Leaves:
        """Read the leaves that the plan wants at offsets from the row, and the masks of real offsets."""
        steps, inside = find_nearest_steps(self.plan, extent)
        offset_slots = self._backend.ring.shift(slots.unsqueeze(1), steps)
        zeros = self.plan.layout is ReadLayout.ZEROS
        if zeros:
            offset_slots = torch.where(inside, offset_slots, -1)
        sizes = [len(group.offsets or ()) for group in self._windows]
        batch: Leaves = {}
        for (group, leaves), group_slots, mask in zip(
            self._windows.items(), offset_slots.split(sizes, 1), inside.split(sizes, 1), strict=True
        ):
            read = self._backend.read_leaves(group_slots.contiguous().view(-1), tuple(leaves), padded=zeros)
            batch |= zip(leaves.values(), (leaf.unflatten(0, group_slots.shape) for leaf in read), strict=True)
            if group.mask is not None:
                batch[group.mask] = mask.contiguous()
        return batch

    def _read_sequences(self, slots: torch.Tensor) -> Leaves:
        backend, ring, plan = self._backend, self._backend.ring, self.plan
        before, after = plan.num_steps_around
        ids = backend.ids(slots)
        windows = ring.sequence_slots(ids, before, after + 1, plan.cross_episodes)
        is_step, flat = windows >= 0, windows.contiguous().view(-1)
        batch: Leaves = {INDEX: ids, MASK: is_step}
        for group, leaves in self._windows.items():
            if group.anchor is ReadAnchor.NEXT:
                # Slot -1 reads an arbitrary row, so the values read for it are set to zero below.
                read = backend.read_leaves(ring.shift(flat), tuple(leaves))
                has_no_slot = flat < 0
                for leaf in read:
                    # Leaves are filled as bits, because torch cannot fill uint16.
                    as_indexable(leaf).masked_fill_(add_axes(has_no_slot, leaf), 0)
            else:
                read = backend.read_leaves(flat, tuple(leaves), padded=True)
            batch |= zip(leaves.values(), (leaf.unflatten(0, windows.shape) for leaf in read), strict=True)
        for leaves in self._items.values():
            batch |= zip(leaves.values(), backend.read_leaves(windows[:, 0].contiguous(), tuple(leaves)), strict=True)
        is_drawn_or_later = (windows == slots.unsqueeze(1)).cummax(1).values
        # Slot -1 reads the flag of the last slot, so `is_step` masks it.
        batch |= {TRAIN: is_step & is_drawn_or_later, IS_FIRST: ring.first.view(-1)[windows] & is_step}
        if plan.step_index:
            batch[STEP_INDEX] = torch.where(is_step, ring.ids_at(flat).view(windows.shape), -1)
        return batch


def _find_leaf_paths(plan: ReadPlan, group: ReadGroup) -> dict[int, Path]:
    return {read.leaf: read.path for read in plan.reads if read.group == group}


def find_nearest_steps(plan: ReadPlan, extent: EpisodeExtent) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest stored step per offset of all groups [B, offsets], and a mask of offsets that are stored."""
    steps, is_from_last, has_final_obs = _make_offset_tensors(plan, extent.following.device)
    target_steps = steps if extent.last is None else steps + is_from_last * extent.last.unsqueeze(1)
    max_steps = extent.following.unsqueeze(1) + has_final_obs
    steps = torch.minimum(torch.maximum(target_steps, -extent.preceding.unsqueeze(1)), max_steps)
    return steps, steps == target_steps


# The tensors are cached, because making a tensor from numbers synchronises. They are made outside inference mode,
# because inference tensors would be unusable in training.
@lru_cache(maxsize=128)
@torch.inference_mode(False)
def _make_offset_tensors(plan: ReadPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the steps of all offsets, and masks of offsets that count from the last step or count observations."""
    offsets = [
        (offset, group.anchor is ReadAnchor.NEXT, group) for group in plan.groups for offset in group.offsets or ()
    ]
    numbers = [
        [offset + is_next for offset, is_next, _ in offsets],
        [is_next for _, is_next, _ in offsets],
        [group.counts_observations for _, _, group in offsets],
    ]
    steps, is_from_last, counts_observations = torch.tensor(numbers, dtype=torch.int64, device=device)
    return steps, is_from_last, counts_observations


def reduce_steps(steps: Leaves, plan: ReadPlan) -> Leaves:
    """Compute the batch of a plan from all its steps [B, L, …], which `with_all_steps` read and a view may change."""
    if plan.is_transition:
        return {path: steps[path] for path in plan.paths}
    if plan.layout is ReadLayout.PACKED:
        items = {read.path for read in plan.reads if read.group.offsets is None}
        return {path: steps[path][:, 0].contiguous() if path in items else steps[path] for path in plan.paths}
    train, device = steps[TRAIN], steps[TRAIN].device
    preceding = (steps[MASK] & ~train).sum(1) if plan.num_steps_around[0] else torch.zeros_like(steps[INDEX])
    ended = (steps[("terminated",)] & train).long()
    continues = train & (ended.cumsum(1) == ended)
    rows = cached_arange(0, len(train), 1, device)
    batch, last = {INDEX: steps[INDEX]}, torch.zeros_like(preceding)
    if plan.n:
        summed_positions = rows.unsqueeze(1), preceding.unsqueeze(1) + cached_arange(0, plan.n, 1, device)
        is_over, missing = find_missing_steps(~continues[summed_positions].t())
        summed = [read.path for read in plan.reads if read.group.anchor is ReadAnchor.SUM]
        sums, batch[DISCOUNT] = sum_n_step_rewards(
            [steps[path][summed_positions].transpose(0, 1) for path in summed], is_over, missing, plan.gamma
        )
        batch |= zip(summed, sums, strict=True)
        last = plan.n - 1 - missing
    ends = preceding + last
    for path, _, group in plan.reads:
        if group.offsets is None and group.anchor is not ReadAnchor.SUM:
            batch[path] = steps[path][rows, ends if group.anchor in (ReadAnchor.LAST, ReadAnchor.NEXT) else preceding]
    batch |= _reduce_offsets(steps, plan, EpisodeExtent(preceding, continues.sum(1) - 1, last), rows.unsqueeze(1))
    return {path: batch[path] for path in plan.paths}


def _reduce_offsets(steps: Leaves, plan: ReadPlan, extent: EpisodeExtent, rows: torch.Tensor) -> Leaves:
    """Select the leaves of groups with offsets, and their masks, from steps [B, L, …]."""
    groups = [group for group in plan.groups if group.offsets is not None]
    if not groups:
        return {}
    nearest_steps, inside = find_nearest_steps(plan, extent)
    following, sizes = extent.following.unsqueeze(1), [len(group.offsets or ()) for group in groups]
    batch: Leaves = {}
    for group, step, mask in zip(groups, nearest_steps.split(sizes, 1), inside.split(sizes, 1), strict=True):
        positions = torch.minimum(step, following) + extent.preceding.unsqueeze(1)
        for path in _find_leaf_paths(plan, group).values():
            obs_path = ("obs", *path[1:]) if group.anchor is ReadAnchor.NEXT else path
            leaf = as_indexable(steps[obs_path])[rows, positions]
            if group.counts_observations:
                leaf = torch.where(
                    add_axes(step > following, leaf),
                    as_indexable(steps[make_next_obs_path(obs_path)])[rows, positions],
                    leaf,
                )
            if plan.layout is ReadLayout.ZEROS:
                leaf = leaf.masked_fill(add_axes(~mask, leaf), 0)
            batch[path] = leaf.view(steps[obs_path].dtype)
        if group.mask is not None:
            batch[group.mask] = mask.contiguous()
    return batch
