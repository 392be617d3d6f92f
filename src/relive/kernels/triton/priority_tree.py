"""The priority tree on a device: kernels that set and draw leaves, and their launches.

Leaves are float64. Every node stores the running sums of its 16 children, added from left to right: one cache line,
with which a draw compares its point. Levels are stored from the lowest one up; a node of level l covers 16^(l + 1)
leaves, and the top level is one node. Nodes above a changed leaf are recomputed from their children, without
differences or atomics: the same updates give the same bits.

Leaves are multiplied by a power of two before they are summed, as in the native core: in the normal scale sums cannot
overflow, in the tiny scale denormal leaves keep their digits. Sums are stored in both scales, and a draw uses the one
that suits the total.

A change takes a few dependent launches. The first two find the leaves and set their masses. Then one program recomputes
each dirty subtree of 16³ leaves, and one program the levels above.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import SIZES, BoundKernel, split_into_programs
from relive.kernels.triton.rings import FINAL, TRANSITION, get_newest_row, get_slot
from relive.kernels.triton.stream import (
    CELL,
    MAX_DRAWS,
    draw_random_pair,
    increment_draw_counts,
    load_draw_counts,
    split_draws_into_programs,
)

if TYPE_CHECKING:
    from relive.replay.ring import Ring

NORMAL = tl.constexpr(2.0**-64)
TINY = tl.constexpr(2.0**512)
TINY_TOTAL = tl.constexpr(2.0**-400)
"""If the total in the normal scale is below this number, all leaves are small enough for the tiny scale."""
MIN_WEIGHT = tl.constexpr(2.0**-126)
"""The smallest normal float32. Weights are at least this number, because a weight of zero would drop the row."""
SUBTREE_LEVELS = 3
"""Number of levels of the tree that form one subtree."""
SUBTREE = tl.constexpr(16**SUBTREE_LEVELS)
"""Number of leaves in a subtree."""
BLOCK = 256
DRAW_BLOCK = 2 * CELL.value


@triton.jit
def _renew_nodes(children, step, factor, child_minima, entries, nodes, minima, group, mask, HAS_MINIMA: tl.constexpr):
    """Recompute the running sums of the nodes `group`, and the smallest positive leaf below each."""
    values = ()
    for j in tl.static_range(16):
        child = group * 16 + j
        values = values + (tl.load(children + child * step, mask & (child < entries), other=0.0),)  # noqa: RUF005
    total = tl.zeros(group.shape, tl.float64)
    for j in tl.static_range(16):
        total = total + values[j] * factor
        tl.store(nodes + group * 16 + j, total, mask)
    if HAS_MINIMA:
        smallest = tl.full(group.shape, float("inf"), tl.float64)
        for j in tl.static_range(16):
            child = group * 16 + j
            value = tl.load(child_minima + child, mask & (child < entries), other=0.0)
            smallest = tl.where((value > 0) & (value < smallest), value, smallest)
        tl.store(minima + group, smallest, mask)


@triton.jit
def _renew_parents(sums, minima, first_child, first, entries, size, group, HAS_MINIMA: tl.constexpr):
    """Recompute the nodes `group` in both scales from their children, which start at node `first_child`."""
    inside = group * 16 < entries
    for scale in tl.static_range(2):
        scaled_sums = sums + scale * size
        _renew_nodes(
            scaled_sums + first_child * 16 + 15, 16, 1.0, minima + first_child, entries,
            scaled_sums + first * 16, minima + first, group, inside, HAS_MINIMA,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def renew_subtrees_kernel(
    leaves, sums, minima, dirty, num_leaves: tl.int64, size: tl.int64, LEVELS: tl.constexpr, HAS_MINIMA: tl.constexpr
):
    """Recompute the dirty subtrees, one per program. `size` is the number of sums per scale."""
    subtree = tl.program_id(0).to(tl.int64)
    is_dirty = tl.load(dirty + subtree) != 0
    # All warps must have read the flag before it is cleared.
    tl.debug_barrier()
    if is_dirty:
        tl.store(dirty + subtree, (subtree * 0).to(tl.uint8))
        group = subtree * 256 + tl.arange(0, 256)
        inside = group * 16 < num_leaves
        _renew_nodes(leaves, 1, NORMAL, leaves, num_leaves, sums, minima, group, inside, HAS_MINIMA)
        _renew_nodes(leaves, 1, TINY, leaves, num_leaves, sums + size, minima, group, inside, False)
        first_child = num_leaves * 0
        entries = (num_leaves + 15) // 16
        if LEVELS > 1:
            tl.debug_barrier()
            group = subtree * 16 + tl.arange(0, 16)
            _renew_parents(sums, minima, first_child, entries, entries, size, group, HAS_MINIMA)
        if LEVELS > 2:
            tl.debug_barrier()
            first_child = entries
            entries = (entries + 15) // 16
            group = subtree + tl.arange(0, 1)
            _renew_parents(sums, minima, first_child, first_child + entries, entries, size, group, HAS_MINIMA)


@triton.jit(do_not_specialize=SIZES)
def renew_top_kernel(
    sums, minima, num_leaves: tl.int64, size: tl.int64, levels: tl.int64, HAS_MINIMA: tl.constexpr, BLOCK: tl.constexpr
):
    """Recompute the levels above the subtrees in one program."""
    nodes = (num_leaves + 15) // 16
    upper_nodes = (nodes + 15) // 16
    first_child = nodes + upper_nodes
    entries = (upper_nodes + 15) // 16
    for _ in range(3, levels):
        for start in range(0, (entries + 15) // 16, BLOCK):
            group = start + tl.arange(0, BLOCK).to(tl.int64)
            _renew_parents(sums, minima, first_child, first_child + entries, entries, size, group, HAS_MINIMA)
        first_child += entries
        entries = (entries + 15) // 16
        tl.debug_barrier()


@triton.jit
def _compute_power(x, exponent):
    """Return x^exponent of positive float64; exactly x for an exponent of 1."""
    # Triton's interpreter lacks the function `pow`, so the power is computed by exp2 and log2.
    return tl.where(exponent == 1.0, x, tl.exp2(exponent * tl.log2(x)))


@triton.jit
def get_mass(priority, alpha, eps):
    """Return the mass (priority + eps)^alpha; NaN if priority + eps is negative or NaN.

    The mass of a positive base is positive even if the power underflows, so that its leaf can be drawn.
    """
    base = priority + eps
    mass = _compute_power(tl.where(base > 0, base, 1.0), alpha)
    smallest = (base * 0 + 1).to(tl.int64).to(tl.float64, bitcast=True)
    mass = tl.where(mass > 0, mass, smallest)
    return tl.where(base > 0, mass, tl.where(base == 0, base, float("nan")))


@triton.jit
def _find_leaves(ids, kind, head, is_open, slots, num_envs, num_sampleable, inside):
    """Return flat slots of row ids, -1 for rows that can no longer be sampled, and the mask of ids never issued."""
    is_id = inside & (ids >= 0)
    positive = tl.where(is_id, ids, 0)
    env, row = positive % num_envs, positive // num_envs
    next_row = tl.load(head + env, is_id, other=0)
    newest = get_newest_row(head, is_open, env, is_id)
    slot = get_slot(row, env, slots, num_envs)
    row_kind = tl.load(kind + slot, is_id, other=0)
    in_window = is_id & (row > newest - num_sampleable)
    is_unknown = inside & ((ids < -1) | (is_id & (row >= next_row)) | (in_window & (row_kind == FINAL)))
    return tl.where(in_window & (row_kind == TRANSITION) & ~is_unknown, slot, -1), is_unknown


@triton.jit
def _count_true(counter, mask):
    count = tl.sum(mask.to(tl.int64), axis=0)
    if count > 0:
        tl.atomic_add(counter, count)


@triton.jit(do_not_specialize=SIZES)
def check_priorities_kernel(
    index, priority, accepted_leaves, masses, stale, count: tl.int64, alpha: tl.float64, eps: tl.float64,
    kind, head, is_open, slots: tl.int64, num_envs: tl.int64, num_sampleable: tl.int64,
    stamps, largest, faults, num_leaves: tl.int64,
    BY_ID: tl.constexpr, TRANSFORMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Check priorities, compute leaves and masses, and stamp each leaf with its last position in `index`.

    `index` are leaves, or with BY_ID the ids of rows. The mass is (priority + eps)^alpha with TRANSFORMS, and the
    priority without. Leaves and ids of -1 and overwritten rows are counted in `stale`. Invalid priorities and ids that
    were never issued are skipped and counted in `faults`. `largest` holds the bits of a float64, which sort like the
    float.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    leaf = tl.load(index + position, inside, other=-1)
    is_unknown = inside & (leaf >= num_leaves)
    if BY_ID:
        leaf, is_unknown = _find_leaves(leaf, kind, head, is_open, slots, num_envs, num_sampleable, inside)
    value = tl.load(priority + position, inside, other=0).to(tl.float64)
    mass = value
    if TRANSFORMS:
        mass = get_mass(value, alpha, eps)
    infinity = float("inf")
    is_valid = (value >= 0) & (value < infinity) & (mass < infinity)
    is_stored = inside & (leaf >= 0) & ~is_unknown
    is_accepted = is_stored & is_valid
    tl.store(accepted_leaves + position, tl.where(is_accepted, leaf, -1), inside)
    tl.store(masses + position, mass, inside)
    tl.atomic_max(stamps + leaf, (position + 1).to(tl.int32), is_accepted)
    _count_true(stale, inside & ~is_stored)
    _count_true(faults + 1, is_unknown)
    if TRANSFORMS:
        _count_true(faults, inside & ~is_valid)
        block_largest = tl.max(tl.where(is_accepted, value, 0.0), axis=0)
        tl.atomic_max(largest, block_largest.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=SIZES)
def set_masses_kernel(accepted_leaves, masses, count: tl.int64, leaves, stamps, dirty, BLOCK: tl.constexpr):
    """Set the masses of leaves. The last mass wins if a leaf repeats."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    leaf = tl.load(accepted_leaves + position, position < count, other=-1)
    # Only the last position of a repeated leaf equals its stamp: this lane sets the leaf and then clears the stamp.
    is_last = (leaf >= 0) & (tl.load(stamps + leaf, leaf >= 0, other=0) == (position + 1).to(tl.int32))
    tl.store(leaves + leaf, tl.load(masses + position, is_last, other=0.0), is_last)
    tl.store(stamps + leaf, tl.zeros((BLOCK,), tl.int32), is_last)
    tl.store(dirty + leaf // SUBTREE, tl.full((BLOCK,), 1, tl.uint8), is_last)


@triton.jit(do_not_specialize=SIZES)
def set_written_slots_kernel(
    changed_slots, is_changed, count: tl.int64, kind, alpha: tl.float64, eps: tl.float64, leaves, dirty, largest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the leaves of slots that a write changed: transitions to the mass of the largest priority, others to zero."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    mask = tl.load(is_changed + position, inside, other=0) != 0
    slot = tl.load(changed_slots + position, mask, other=0)
    row_kind = tl.load(kind + slot, mask, other=0)
    # A slot that occurs twice is set to the same number both times.
    tl.store(leaves + slot, tl.where(row_kind == TRANSITION, get_mass(tl.load(largest), alpha, eps), 0.0), mask)
    tl.store(dirty + slot // SUBTREE, tl.full((BLOCK,), 1, tl.uint8), mask)


@triton.jit
def _next_smaller(x):
    """Return the next smaller float64 of a positive x, and 0 for 0."""
    bits = x.to(tl.int64, bitcast=True)
    return tl.where(x > 0, bits - 1, 0).to(tl.float64, bitcast=True)


@triton.jit
def _find_leaf_at_point(sums, point, num_leaves, levels, root, BLOCK: tl.constexpr):
    """Find the leaves that contain points [BLOCK] of the total.

    At each level the first child whose running sum exceeds the point is chosen, which is never a child of zero.
    Rounding may put a point at or past the end of a node; the point is then moved to just before the end.
    """
    node = tl.zeros((BLOCK,), tl.int64)
    # Before the loop, `first` is the number of all nodes; in the loop it is the first node of a level.
    first = (root + 1) // 16
    for i in range(levels):
        shift = 4 * (levels - i)
        nodes = (num_leaves + (num_leaves * 0 + 1 << shift) - 1) >> shift
        first -= nodes
        # The minimum keeps `node` in range if the sums are wrong or all zero; correct sums never need it.
        node = tl.minimum(node, nodes - 1)
        ends = tl.load(sums + ((first + node) * 16)[:, None] + tl.arange(0, 16)[None, :])
        inside = tl.minimum(point, _next_smaller(tl.max(ends, axis=1)))
        is_before = ends <= inside[:, None]
        point = inside - tl.max(tl.where(is_before, ends, 0.0), axis=1)
        node = node * 16 + tl.minimum(tl.sum(is_before.to(tl.int64), axis=1), 15)
    return tl.minimum(node, num_leaves - 1)


@triton.jit
def _compute_weight(smallest, priority, beta):
    """Return (smallest / priority)^beta, in (0, 1]."""
    ratio = smallest / priority
    weight = tl.exp2(beta * tl.log2(tl.where(ratio > 0, ratio, 1.0)))
    # The ratio may underflow to 0 in float64, and its power in float32; weights are therefore at least MIN_WEIGHT.
    weight = tl.where(ratio > 0, weight, tl.where(beta > 0, ratio, 1.0))
    return tl.where(weight < MIN_WEIGHT, MIN_WEIGHT, weight).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def prioritized_draw_kernel(
    drawn_leaves, priorities, weights, start: tl.int64, rows: tl.int64, count: tl.int64, beta: tl.float64,
    stream, leaves, sums, minima, faults, num_leaves: tl.int64, levels: tl.int64, root: tl.int64, size: tl.int64,
    HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw leaves [rows] and their priorities, one from each of `count` equal slices of the total, from `start` on.

    With HAS_WEIGHTS also compute weights relative to the smallest of all priorities.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < rows
    call = load_draw_counts(stream, position, inside)
    bits, _ = draw_random_pair(tl.load(stream), call, position, 0)
    # The second term has 53 random bits and is in [0, 1).
    point_in_slices = (start + position).to(tl.float64) + (bits >> 10).to(tl.float64) * 1.1102230246251565e-16
    is_tiny = tl.load(sums + root) < TINY_TOTAL
    scaled_sums = sums + tl.where(is_tiny, size, 0)
    total = tl.load(scaled_sums + root)
    leaf = _find_leaf_at_point(scaled_sums, point_in_slices * (total / count), num_leaves, levels, root, BLOCK)
    priority = tl.load(leaves + leaf, inside, other=float("inf"))
    tl.store(drawn_leaves + position, leaf, inside)
    tl.store(priorities + position, priority, inside)
    if HAS_WEIGHTS:
        tl.store(weights + position, _compute_weight(tl.load(minima + (root + 1) // 16 - 1), priority, beta), inside)
    if (tl.program_id(0) == 0) & (start == 0) & ~(total > 0):
        tl.store(faults + 2, tl.load(faults + 2) + 1)
    increment_draw_counts(stream, position, call, inside)


@triton.jit(do_not_specialize=SIZES)
def weights_kernel(priorities, weights, count: tl.int64, beta: tl.float64, BLOCK: tl.constexpr):
    """Compute weights relative to the smallest drawn priority, which every program searches for itself."""
    smallest = tl.full((BLOCK,), float("inf"), tl.float64)
    for start in range(0, count, BLOCK):
        position = start + tl.arange(0, BLOCK).to(tl.int64)
        smallest = tl.minimum(smallest, tl.load(priorities + position, position < count, other=float("inf")))
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    priority = tl.load(priorities + position, position < count, other=1.0)
    tl.store(weights + position, _compute_weight(tl.min(smallest, axis=0), priority, beta), position < count)


class TritonTree:
    """A `PriorityTree` whose changes and draws take a few launches and never synchronise.

    Draws use a `DeviceStream`. The device also stores the largest accepted priority and counters of faults.
    """

    keeps_largest = True

    def __init__(self, num_leaves: int, device: torch.device) -> None:
        self.num_leaves, self._device = num_leaves, device
        nodes, self._levels = 0, 0
        entries = num_leaves
        while self._levels == 0 or entries > 1:
            entries = -(-entries // 16)
            nodes, self._levels = nodes + entries, self._levels + 1
        self._size = nodes * 16
        """Number of sums per scale; the last sum is the total."""
        self._leaves = torch.zeros(num_leaves, dtype=torch.float64, device=device)
        self._sums = torch.zeros(2, self._size, dtype=torch.float64, device=device)
        """Sums in the normal and in the tiny scale."""
        self._minima = torch.full((nodes,), math.inf, dtype=torch.float64, device=device)
        self._subtrees = -(-num_leaves // SUBTREE.value)
        self._dirty = torch.zeros(self._subtrees, dtype=torch.uint8, device=device)
        """Flags of subtrees whose sums must be recomputed."""
        self._stamps = torch.zeros(num_leaves, dtype=torch.int32, device=device)
        """The last position of each leaf in the current update, plus 1; 0 for leaves that are not updated."""
        self.largest = torch.ones((), dtype=torch.float64, device=device)
        """Largest valid priority passed to `set_priorities`, at least 1."""
        self.faults = torch.zeros(3, dtype=torch.int64, device=device)
        """Numbers of invalid priorities, of leaves outside the tree or ids never issued, and of draws of zeros only."""
        self._keeps_minima = False
        """Whether updates maintain the minima, which costs time: they do from the first use of the minima on."""
        leaves, sums, minima, dirty = self._leaves, self._sums, self._minima, self._dirty
        self._checks: dict[torch.dtype, BoundKernel] = {}
        """Launches of `check_priorities_kernel` by the dtype of the priorities."""
        self._set_masses = BoundKernel(set_masses_kernel, (leaves, self._stamps, dirty))
        self._set_written = BoundKernel(set_written_slots_kernel, (leaves, dirty, self.largest))
        sizes = num_leaves, self._size
        levels = min(self._levels, SUBTREE_LEVELS)
        self._renew_subtrees = BoundKernel(renew_subtrees_kernel, (leaves, sums, minima, dirty, *sizes), LEVELS=levels)
        self._renew_top = BoundKernel(renew_top_kernel, (sums, minima, *sizes, self._levels), BLOCK=BLOCK, num_warps=8)
        self._draw_leaves = BoundKernel(
            prioritized_draw_kernel,
            (leaves, sums, minima, self.faults, num_leaves, self._levels, self._size - 1, self._size),
        )
        self._compute_weights = BoundKernel(weights_kernel)

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        if not isinstance(priorities, torch.Tensor):
            priorities = torch.full_like(leaves, priorities, dtype=torch.float64)
        self._update(leaves, priorities, None, 1.0, 0.0, transforms=False)

    def update_priorities(
        self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, largest: Any
    ) -> None:
        """Return None: `update_priorities` would synchronise, and callers use `set_priorities` instead."""

    def set_priorities(
        self, index: torch.Tensor, priority: torch.Tensor, alpha: float, eps: float, ring: Ring | None = None
    ) -> torch.Tensor:
        """Set the leaves `index` [K] to the mass (priority + eps)^alpha. With a ring, `index` are ids of its rows.

        Returns the number of skipped leaves of -1 and overwritten rows (int64 []). Invalid priorities and ids that were
        never issued are skipped too, and counted in `faults`. The last priority wins if a leaf repeats.
        """
        return self._update(index, priority, ring, alpha, eps, transforms=True)

    def set_written_slots(
        self, changed_slots: torch.Tensor, is_changed: torch.Tensor, kind: torch.Tensor, alpha: float, eps: float
    ) -> None:
        """Set the leaves of slots that a write changed.

        Transitions get the mass of the largest priority, all other slots zero. `kind` are the kinds of all slots.
        """
        count = len(changed_slots)
        if count:
            block, programs = split_into_programs(count, BLOCK)
            arguments = changed_slots, is_changed, count, kind, float(alpha), float(eps)
            self._set_written(kind, (programs, 1, 1), *arguments, BLOCK=block)
            self._renew_sums()

    def _update(
        self, index: torch.Tensor, priority: torch.Tensor, ring: Ring | None, alpha: float, eps: float, *,
        transforms: bool,
    ) -> torch.Tensor:  # fmt: skip
        count, device = len(index), self._device
        stale = torch.zeros((), dtype=torch.int64, device=device)
        if not count:
            return stale
        index, priority = index.contiguous(), priority.contiguous()
        accepted_leaves, masses = torch.empty_like(index), torch.empty(count, dtype=torch.float64, device=device)
        check = self._checks.get(priority.dtype)
        if check is None:
            fixed = self._stamps, self.largest.view(torch.int64), self.faults, self.num_leaves
            check = self._checks[priority.dtype] = BoundKernel(check_priorities_kernel, fixed)
        # Without a ring the kernel reads neither the state nor the sizes, so placeholders are passed.
        state = (self._dirty, self.faults, self._dirty) if ring is None else (ring.kind, ring.head, ring.open)
        sizes = (1, 1, 1) if ring is None else (ring.slots, ring.num_envs, ring.num_sampleable)
        block, programs = split_into_programs(count, BLOCK)
        check(
            index, (programs, 1, 1), index, priority, accepted_leaves, masses, stale, count, float(alpha), float(eps),
            *state, *sizes, BY_ID=ring is not None, TRANSFORMS=transforms, BLOCK=block,
        )  # fmt: skip
        self._set_masses(index, (programs, 1, 1), accepted_leaves, masses, count, BLOCK=block)
        self._renew_sums()
        return stale

    def _renew_sums(self) -> None:
        """Recompute dirty subtrees and the levels above them."""
        self._renew_subtrees(self._sums, (self._subtrees, 1, 1), HAS_MINIMA=self._keeps_minima)
        if self._levels > SUBTREE_LEVELS:
            self._renew_top(self._sums, (1, 1, 1), HAS_MINIMA=self._keeps_minima)

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        return self._leaves.index_select(0, leaves)

    def total_priority(self) -> torch.Tensor:
        normal, tiny = self._sums[:, -1]
        is_tiny = normal < TINY_TOTAL.value
        return torch.where(is_tiny, tiny / TINY.value, normal / NORMAL.value)

    def smallest_priority(self) -> torch.Tensor:
        self._build_minima()
        return self._minima[-1].clone()

    def _build_minima(self) -> None:
        if not self._keeps_minima:
            self._keeps_minima = True
            self.rebuild()

    def draw(self, count: int, random: Any) -> torch.Tensor:
        return self._draw(count, random, 0.0, None)[0]

    def draw_weighted(
        self, count: int, random: Any, beta: float, by_global_min: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if by_global_min:
            self._build_minima()
        if weights is None:
            weights = torch.empty(count, dtype=torch.float32, device=self._device)
        leaves, priorities = self._draw(count, random, beta, weights if by_global_min else None)
        if count and not by_global_min:
            block, programs = split_into_programs(count, BLOCK)
            self._compute_weights(priorities, (programs, 1, 1), priorities, weights, count, beta, BLOCK=block)
        return leaves, weights

    def _draw(
        self, count: int, random: Any, beta: float, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = random.numbers
        leaves = torch.empty(count, dtype=torch.int64, device=self._device)
        priorities = torch.empty(count, dtype=torch.float64, device=self._device)
        out = leaves, priorities, priorities if weights is None else weights
        for start in range(0, count, MAX_DRAWS):
            part = out if count <= MAX_DRAWS else tuple(each[start : start + MAX_DRAWS] for each in out)
            rows = min(count - start, MAX_DRAWS)
            block, programs = split_draws_into_programs(rows, DRAW_BLOCK)
            self._draw_leaves(
                numbers, (programs, 1, 1), *part, start, rows, count, beta, numbers,
                HAS_WEIGHTS=weights is not None, BLOCK=block,
            )  # fmt: skip
        return leaves, priorities

    def leaves_view(self) -> torch.Tensor:
        return self._leaves

    def rebuild(self) -> None:
        self._dirty.fill_(1)
        self._renew_sums()

    def max_sum_error(self) -> float:
        worst = 0.0
        for scale, sums in zip((NORMAL.value, TINY.value), self._sums, strict=True):
            values, minima, first = self._leaves * scale, self._leaves, 0
            while first < self._size // 16:
                groups = -(-len(values) // 16)
                padding = (0, groups * 16 - len(values))
                running = torch.nn.functional.pad(values, padding).view(groups, 16).cumsum(1)
                stored = sums[first * 16 : (first + groups) * 16].view(groups, 16)
                error = torch.where(stored == running, 0.0, (stored - running).abs() / running)
                worst = max(worst, error.nan_to_num(math.inf).max().item())
                positive = torch.where(minima > 0, minima, math.inf)
                minima = torch.nn.functional.pad(positive, padding, value=math.inf).view(groups, 16).amin(1)
                if self._keeps_minima and not torch.equal(minima, self._minima[first : first + groups]):
                    worst = math.inf
                values, first = stored[:, -1], first + groups
        return worst
