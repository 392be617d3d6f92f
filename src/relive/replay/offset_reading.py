"""Windows of single fields in torch ops, for every store: a few launches, however many offsets there are."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from relive.kernels.torch_ops import n_step_sums
from relive.replay.composed import ENDS
from relive.replay.offset_plan import Counted, OffsetPlan
from relive.replay.store import Leaves, ReplayStore


class Reach(NamedTuple):
    """How far the episodes of rows are stored, as far as any offset goes [B]."""

    preceding: torch.Tensor
    ahead: torch.Tensor
    last: torch.Tensor | None
    """The last of up to n steps, counted from the row on; None: the row itself."""


def reach_of(store: ReplayStore, slots: torch.Tensor, plan: OffsetPlan) -> Reach:
    """How far the episodes around these rows are stored."""
    ring = store.memory.ring
    preceding, ahead = ring.reach(slots, *plan.reach(ring.slots))
    return Reach(preceding, ahead, ahead.clamp(max=plan.n - 1) if plan.n else None)


def nearest(plan: OffsetPlan, reach: Reach) -> tuple[torch.Tensor, torch.Tensor]:
    """For the offsets of all groups, one after the other [B, offsets]: the nearest step, and whether it is the one."""
    steps, of_next, has_next = _constants(plan, reach.ahead.device)
    wanted = steps if reach.last is None else steps + of_next * reach.last.unsqueeze(1)
    most = reach.ahead.unsqueeze(1) + has_next
    found = torch.minimum(torch.maximum(wanted, -reach.preceding.unsqueeze(1)), most)
    return found, found == wanted


@lru_cache(maxsize=128)  # a tensor made of numbers would wait for the device
def _constants(plan: OffsetPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all offsets of all groups: the step, whether it counts from the last step on, whether a final one counts."""
    counted = [group.counted for group in plan.groups for _ in group.offsets]
    steps = [step for each in plan.steps for step in each]
    of_next = [each == Counted.NEXT_OBSERVATIONS for each in counted]
    has_next = [each != Counted.STEPS for each in counted]
    found = torch.tensor([steps, of_next, has_next], dtype=torch.int64, device=device)
    return found[0], found[1], found[2]


def windowed(store: ReplayStore, slots: torch.Tensor, plan: OffsetPlan) -> Leaves:
    """See `ReplayStore.windowed`."""
    reach, paths, nexts = reach_of(store, slots, plan), store.schema.paths, store.memory.next_paths
    named, masks = _groups(store, slots, plan, reach)
    once = _once(store, slots, plan, reach)
    leaves = named | once
    batch = {path: leaves[path] for path in (*paths, *nexts)}
    batch[("index",)] = store.ids(slots)
    if plan.n:
        batch[("discount",)] = leaves[("discount",)]
    return batch | masks


def _groups(store: ReplayStore, slots: torch.Tensor, plan: OffsetPlan, reach: Reach) -> tuple[Leaves, Leaves]:
    steps, inside = nearest(plan, reach)
    at = store.later(slots.unsqueeze(1), steps)
    if plan.zeros:
        at = torch.where(inside, at, -1)
    sizes = [len(group.offsets) for group in plan.groups]
    named: Leaves = {}
    masks: Leaves = {}
    for group, where, mask in zip(plan.groups, at.split(sizes, 1), inside.split(sizes, 1), strict=True):
        leaves = store.take(where.contiguous().view(-1), group.leaves, padded=plan.zeros)
        for i, leaf in zip(group.leaves, leaves, strict=True):
            path = store.schema.paths[i]
            named[("next_obs", *path[1:]) if group.is_next else path] = leaf.unflatten(0, where.shape)
        masks[group.mask] = mask.contiguous()
    return named, masks


def _once(store: ReplayStore, slots: torch.Tensor, plan: OffsetPlan, reach: Reach) -> Leaves:
    """What has no offsets: as `Transition` or `NStep` read it."""
    schema, left = store.schema, [i for i, group in enumerate(plan.leaf_groups) if group < 0]
    nexts = [i for i, group in zip(store.memory.observed, plan.next_groups, strict=True) if group < 0]
    if reach.last is None:
        return _taken(store, slots, left) | _taken_next(store, slots, nexts, None)
    summed = [i for i in left if schema.paths[i][0] == "reward"]
    ends = [i for i in left if schema.paths[i][0] in ENDS]
    sums, discount = _sums(store, slots, plan, reach.last, summed)
    found = _taken(store, slots, [i for i in left if i not in summed and i not in ends])
    found |= _taken(store, store.later(slots, reach.last), ends) if ends else {}
    found |= zip((schema.paths[i] for i in summed), sums, strict=True)
    return found | _taken_next(store, slots, nexts, reach.last) | {("discount",): discount}


def _taken(store: ReplayStore, slots: torch.Tensor, leaves: list[int]) -> Leaves:
    if not leaves:
        return {}
    return dict(zip((store.schema.paths[i] for i in leaves), store.take(slots, leaves), strict=True))


def _taken_next(store: ReplayStore, slots: torch.Tensor, leaves: list[int], last: torch.Tensor | None) -> Leaves:
    """The leaves of the observation that the last step from each slot on led to; None: the step at the slot."""
    if last is None and len(leaves) == len(store.memory.observed):
        return dict(zip(store.memory.next_paths, store.take_next(slots), strict=True))
    steps = torch.ones_like(slots) if last is None else last + 1
    found = _taken(store, store.later(slots, steps), leaves) if leaves else {}
    return {("next_obs", *path[1:]): leaf for path, leaf in found.items()}


def _sums(
    store: ReplayStore, slots: torch.Tensor, plan: OffsetPlan, last: torch.Tensor, summed: list[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The rewards of the steps up to the last one as one, and their discount."""
    steps = torch.arange(min(plan.n, store.memory.ring.slots), device=slots.device).unsqueeze(1)
    at = store.later(slots, torch.minimum(steps, last))
    rewards = [leaf.unflatten(0, at.shape) for leaf in store.take(at.reshape(-1), summed)] if summed else []
    return n_step_sums(rewards, steps > last, len(steps) - 1 - last, plan.gamma)
