"""Read plans in torch ops: on every device, and for what other backends have no kernels for."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from relive.kernels.constants import count_from, ends_of_run
from relive.kernels.torch_ops import n_step_sums, wide
from relive.replay.read_plan import (
    DISCOUNT,
    INDEX,
    IS_FIRST,
    MASK,
    STEP_INDEX,
    TRAIN,
    Anchor,
    Group,
    Layout,
    Leaves,
    PlanReader,
    ReadPlan,
    next_path,
)
from relive.schema.conversion import bits_of
from relive.schema.fields import Path

if TYPE_CHECKING:
    from relive.replay.backend import Backend


class EpisodeExtent(NamedTuple):
    """How far the episodes of rows are stored, as far as any offset goes [B]."""

    preceding: torch.Tensor
    ahead: torch.Tensor
    last: torch.Tensor | None
    """How far the last of n steps is ahead; None: the row itself is it."""


def until_last(is_no_step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask of n rows [n, B] after the last step, and how many they are [B]: the first that is no step ends them."""
    is_over = is_no_step.cummax(0).values
    return is_over, is_over.sum(0)


_PLACES = {Anchor.ROW: 0, Anchor.FIRST: 0, Anchor.NEXT: 1, Anchor.LAST: 2}
"""The place of an anchor's slots in `ends_of_run`."""


class TorchReader(PlanReader):
    """Reads batches of one plan with a few launches, however many offsets there are."""

    def __init__(self, backend: Backend, plan: ReadPlan) -> None:
        super().__init__(backend, plan)
        self._summed = {read.leaf: read.path for read in plan.reads if read.group.anchor is Anchor.SUM}
        self._windows = {group: _paths_of(plan, group) for group in plan.groups if group.offsets is not None}
        items = [group for group in plan.groups if group.offsets is None and group.anchor is not Anchor.SUM]
        self._items = {group.anchor: _paths_of(plan, group) for group in items}
        rows, nexts = (self._items.get(anchor, {}) for anchor in (Anchor.ROW, Anchor.NEXT))
        both = [] if backend.stores_next_obs else [leaf for leaf in rows if leaf in nexts]
        self._both = {leaf: (rows.pop(leaf), nexts.pop(leaf)) for leaf in both}
        """Leaves of each row and of the row that it led to, which are read at once."""

    def read(self, slots: torch.Tensor) -> Leaves:
        """The batch of the rows at these slots, in tensors of its own."""
        found = self._sequences(slots) if self.plan.layout is Layout.PACKED else self._rows(slots)
        return {path: found[path] for path in self.plan.paths}

    # Rows

    def _rows(self, slots: torch.Tensor) -> Leaves:
        """Rows, with offsets in their places."""
        backend, plan = self._backend, self.plan
        found: Leaves = {}
        missing, places = None, _PLACES
        if plan.n:
            at, missing = self._sum(slots, found)
        else:
            at, found[INDEX] = backend.next_and_ids(slots)
            places = _PLACES | {Anchor.LAST: 0}
        if self._both:
            read = backend.take(at[:2].view(-1), tuple(self._both))
            for (path, led_to), leaf in zip(self._both.values(), read, strict=True):
                both = leaf.view(2, len(slots), *leaf.shape[1:])
                # Not views of one memory: a caller may change one of them while torch keeps the other for a gradient.
                found[path], found[led_to] = both[0], both[1].clone()
        for anchor, leaves in self._items.items():
            if anchor is Anchor.NEXT and backend.stores_next_obs:
                found |= zip(leaves.values(), backend.take_stored_next(slots, tuple(leaves)), strict=True)
            elif leaves:
                found |= zip(leaves.values(), backend.take(at[places[anchor]], tuple(leaves)), strict=True)
        if self._windows:
            last = None if missing is None else plan.n - 1 - missing
            found |= self._offsets(slots, EpisodeExtent(*backend.ring.reach(slots, *plan.reach), last))
        return found

    def _sum(self, slots: torch.Tensor, found: Leaves) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ids, sums and discounts to `found`; the slots of `_PLACES` [3, B], and how many of n steps are not."""
        backend, n = self._backend, self.plan.n
        found[INDEX] = ids = backend.ids(slots)
        run, is_no_step = backend.ring.run(ids, n)
        is_over, missing = until_last(is_no_step)
        rewards = backend.take(run[:-1].reshape(-1), tuple(self._summed)) if self._summed else []
        rewards = [leaf.view(*is_over.shape, *leaf.shape[1:]) for leaf in rewards]
        sums, found[DISCOUNT] = n_step_sums(rewards, is_over, missing, self.plan.gamma)
        found |= zip(self._summed.values(), sums, strict=True)
        places, moves = ends_of_run(n, slots.device)
        return run.gather(0, torch.addcmul(places, moves, missing)), missing

    def _offsets(self, slots: torch.Tensor, extent: EpisodeExtent) -> Leaves:
        """The leaves of all groups with offsets, and their masks."""
        steps, inside = nearest(self.plan, extent)
        at = self._backend.ring.after(slots.unsqueeze(1), steps)
        zeros = self.plan.layout is Layout.ZEROS
        if zeros:
            at = torch.where(inside, at, -1)
        sizes = [len(group.offsets or ()) for group in self._windows]
        found: Leaves = {}
        for (group, leaves), where, mask in zip(
            self._windows.items(), at.split(sizes, 1), inside.split(sizes, 1), strict=True
        ):
            read = self._backend.take(where.contiguous().view(-1), tuple(leaves), padded=zeros)
            found |= zip(leaves.values(), (leaf.unflatten(0, where.shape) for leaf in read), strict=True)
            if group.mask is not None:
                found[group.mask] = mask.contiguous()
        return found

    # Sequences

    def _sequences(self, slots: torch.Tensor) -> Leaves:
        """Steps that are packed to the left."""
        backend, ring, plan = self._backend, self._backend.ring, self.plan
        before, after = plan.reach
        ids = backend.ids(slots)
        windows = ring.windows(ids, before, after + 1, plan.cross_episodes)
        is_step, flat = windows >= 0, windows.contiguous().view(-1)
        found: Leaves = {INDEX: ids, MASK: is_step}
        for group, leaves in self._windows.items():
            if group.anchor is Anchor.NEXT:
                read = backend.take(ring.after(flat), tuple(leaves))  # also of slot -1, which is zeroed below
                is_none = flat < 0
                for leaf in read:
                    bits_of(leaf).masked_fill_(wide(is_none, leaf), 0)  # torch fills no uint16
            else:
                read = backend.take(flat, tuple(leaves), padded=True)
            found |= zip(leaves.values(), (leaf.unflatten(0, windows.shape) for leaf in read), strict=True)
        for leaves in self._items.values():
            found |= zip(leaves.values(), backend.take(windows[:, 0].contiguous(), tuple(leaves)), strict=True)
        is_drawn = (windows == slots.unsqueeze(1)).cummax(1).values  # and what comes after it
        found |= {TRAIN: is_step & is_drawn, IS_FIRST: ring.first.view(-1)[windows] & is_step}  # -1 is a slot here
        if plan.step_index:
            found[STEP_INDEX] = torch.where(is_step, ring.id_of(flat).view(windows.shape), -1)
        return found


def _paths_of(plan: ReadPlan, group: Group) -> dict[int, Path]:
    return {read.leaf: read.path for read in plan.reads if read.group == group}


def nearest(plan: ReadPlan, extent: EpisodeExtent) -> tuple[torch.Tensor, torch.Tensor]:
    """For the offsets of all groups, one after the other [B, offsets]: the nearest step, and whether it is the one."""
    steps, of_next, has_next = _constants(plan, extent.ahead.device)
    wanted = steps if extent.last is None else steps + of_next * extent.last.unsqueeze(1)
    most = extent.ahead.unsqueeze(1) + has_next
    found = torch.minimum(torch.maximum(wanted, -extent.preceding.unsqueeze(1)), most)
    return found, found == wanted


@lru_cache(maxsize=128)  # a tensor made of numbers would wait for the device
@torch.inference_mode(False)  # they are used later, in whatever mode
def _constants(plan: ReadPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For all offsets of all groups: the step, whether it counts from the last step on, whether a final one counts."""
    groups = [(offset, group) for group in plan.groups for offset in group.offsets or ()]
    is_next = [group.anchor is Anchor.NEXT for _, group in groups]
    steps = [offset + after for (offset, _), after in zip(groups, is_next, strict=True)]
    numbers = [steps, is_next, [group.of_observations for _, group in groups]]
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    return found[0], found[1], found[2]


def reduce(steps: Leaves, plan: ReadPlan) -> Leaves:
    """The batch of a plan out of the steps [B, L, …] of `plan.unreduced`; some may have been made an end since."""
    if plan.is_transition:
        return {path: steps[path] for path in plan.paths}
    if plan.layout is Layout.PACKED:
        items = {read.path for read in plan.reads if read.group.offsets is None}
        return {path: steps[path][:, 0].contiguous() if path in items else steps[path] for path in plan.paths}
    train, device = steps[TRAIN], steps[TRAIN].device
    preceding = (steps[MASK] & ~train).sum(1) if plan.reach[0] else torch.zeros_like(steps[INDEX])
    ended = (steps[("terminated",)] & train).long()
    goes_on = train & (ended.cumsum(1) == ended)
    rows = count_from(0, len(train), 1, device)
    found, last = {INDEX: steps[INDEX]}, torch.zeros_like(preceding)
    if plan.n:
        at = rows.unsqueeze(1), preceding.unsqueeze(1) + count_from(0, plan.n, 1, device)
        is_over, missing = until_last(~goes_on[at].t())
        summed = [read.path for read in plan.reads if read.group.anchor is Anchor.SUM]
        sums, found[DISCOUNT] = n_step_sums(
            [steps[path][at].transpose(0, 1) for path in summed], is_over, missing, plan.gamma
        )
        found |= zip(summed, sums, strict=True)
        last = plan.n - 1 - missing
    ends = preceding + last
    for path, _, group in plan.reads:
        if group.offsets is None and group.anchor is not Anchor.SUM:
            found[path] = steps[path][rows, ends if group.anchor in (Anchor.LAST, Anchor.NEXT) else preceding]
    found |= _reduce_offsets(steps, plan, EpisodeExtent(preceding, goes_on.sum(1) - 1, last), rows.unsqueeze(1))
    return {path: found[path] for path in plan.paths}


def _reduce_offsets(steps: Leaves, plan: ReadPlan, extent: EpisodeExtent, rows: torch.Tensor) -> Leaves:
    """The leaves of groups with offsets, out of steps, and their masks."""
    groups = [group for group in plan.groups if group.offsets is not None]
    if not groups:
        return {}
    steps_taken, inside = nearest(plan, extent)
    ahead, sizes = extent.ahead.unsqueeze(1), [len(group.offsets or ()) for group in groups]
    found: Leaves = {}
    for group, step, mask in zip(groups, steps_taken.split(sizes, 1), inside.split(sizes, 1), strict=True):
        at = torch.minimum(step, ahead) + extent.preceding.unsqueeze(1)
        for path in _paths_of(plan, group).values():
            own = ("obs", *path[1:]) if group.anchor is Anchor.NEXT else path
            leaf = bits_of(steps[own])[rows, at]
            if group.of_observations:
                leaf = torch.where(_wide(step > ahead, leaf), bits_of(steps[next_path(own)])[rows, at], leaf)
            if plan.layout is Layout.ZEROS:
                leaf = leaf.masked_fill(_wide(~mask, leaf), 0)
            found[path] = leaf.view(steps[own].dtype)
        if group.mask is not None:
            found[group.mask] = mask.contiguous()
    return found


def _wide(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Flags [B, L] with an axis for each one of `like` [B, L, …]."""
    return flags.view(flags.shape + (1,) * (like.ndim - 2))
