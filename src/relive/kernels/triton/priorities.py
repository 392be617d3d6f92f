"""Kernels of the priority tree on a device: setting, marking and drawing.

Leaves are float64. Every node stores the running sums of its 16 children, added from left to right: one cache line,
with which a draw compares its point. Levels are stored from the lowest one up; a node of level l covers 16^(l + 1)
leaves, and the top level is one node. Nodes above a changed leaf are recomputed from their children, without
differences or atomics: the same updates give the same bits.

Leaves are multiplied by a power of two before they are summed, as in the native core: in the normal scale sums cannot
overflow, in the tiny scale denormal leaves keep their digits. Sums are stored in both scales, and a draw uses the one
that suits the total.

A change takes a few dependent launches: ids to leaves, leaves to masses, then one program per dirty subtree of 16³
leaves, and one program for the levels above.
"""

# Jitted functions are Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton
import triton.language as tl

from relive.kernels.triton.launching import SIZES, Variant
from relive.kernels.triton.rings import FINAL, TRANSITION
from relive.kernels.triton.stream import CELL, count_calls, load_calls, random_pair

NORMAL = tl.constexpr(2.0**-64)
TINY = tl.constexpr(2.0**512)
TINY_TOTAL = tl.constexpr(2.0**-400)
"""If the normal total is below this, all leaves are small enough for the tiny scale."""
MIN_WEIGHT = tl.constexpr(2.0**-126)
"""The smallest normal float32: a weight of zero would drop the row."""
LOWER = 3
"""Number of tree levels in a subtree."""
SUBTREE = tl.constexpr(16**LOWER)
"""Number of leaves in a subtree."""
BLOCK = 256
DRAW_BLOCK = 2 * CELL.value
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
TOP_OPTIONS = {**OPTIONS, "num_warps": 8}


# Sums


@triton.jit
def _renew_nodes(children, step, factor, least_children, entries, nodes, least, group, where, LEAST: tl.constexpr):
    """Recompute the running sums of these nodes and the smallest positive leaf below each."""
    values = ()
    for j in tl.static_range(16):
        child = group * 16 + j
        values = values + (tl.load(children + child * step, where & (child < entries), other=0.0),)  # noqa: RUF005
    total = tl.zeros(group.shape, tl.float64)
    for j in tl.static_range(16):
        total = total + values[j] * factor
        tl.store(nodes + group * 16 + j, total, where)
    if LEAST:
        smallest = tl.full(group.shape, float("inf"), tl.float64)
        for j in tl.static_range(16):
            child = group * 16 + j
            value = tl.load(least_children + child, where & (child < entries), other=0.0)
            smallest = tl.where((value > 0) & (value < smallest), value, smallest)
        tl.store(least + group, smallest, where)


@triton.jit
def _renew_above(sums, least, below, here, entries, size, group, LEAST: tl.constexpr):
    """Recompute these nodes in both scales from the level that starts at node `below`."""
    inside = group * 16 < entries
    for scale in tl.static_range(2):
        own = sums + scale * size
        _renew_nodes(
            own + below * 16 + 15, 16, 1.0, least + below, entries, own + here * 16, least + here, group, inside, LEAST
        )


@triton.jit(do_not_specialize=SIZES)
def renew_kernel(
    leaves, sums, least, dirty, num_leaves: tl.int64, size: tl.int64, LEVELS: tl.constexpr, LEAST: tl.constexpr
):
    """Recompute dirty subtrees, one per program. `size` is the number of sums per scale."""
    subtree = tl.program_id(0).to(tl.int64)
    is_dirty = tl.load(dirty + subtree) != 0
    tl.debug_barrier()  # all warps must have read the flag before it is cleared
    if is_dirty:
        tl.store(dirty + subtree, (subtree * 0).to(tl.uint8))
        group = subtree * 256 + tl.arange(0, 256)
        inside = group * 16 < num_leaves
        _renew_nodes(leaves, 1, NORMAL, leaves, num_leaves, sums, least, group, inside, LEAST)
        _renew_nodes(leaves, 1, TINY, leaves, num_leaves, sums + size, least, group, inside, False)
        below = num_leaves * 0
        entries = (num_leaves + 15) // 16
        if LEVELS > 1:
            tl.debug_barrier()
            _renew_above(sums, least, below, entries, entries, size, subtree * 16 + tl.arange(0, 16), LEAST)
        if LEVELS > 2:
            tl.debug_barrier()
            below = entries
            entries = (entries + 15) // 16
            _renew_above(sums, least, below, below + entries, entries, size, subtree + tl.arange(0, 1), LEAST)


@triton.jit(do_not_specialize=SIZES)
def renew_top_kernel(
    sums, least, num_leaves: tl.int64, size: tl.int64, levels: tl.int64, LEAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Recompute the levels above the subtrees in one program."""
    nodes = (num_leaves + 15) // 16
    more = (nodes + 15) // 16
    below = nodes + more
    entries = (more + 15) // 16
    for _ in range(3, levels):
        for start in range(0, (entries + 15) // 16, BLOCK):
            group = start + tl.arange(0, BLOCK).to(tl.int64)
            _renew_above(sums, least, below, below + entries, entries, size, group, LEAST)
        below += entries
        entries = (entries + 15) // 16
        tl.debug_barrier()


# Changes


@triton.jit
def _power(x, exponent):
    """x^exponent of positive float64; exactly x for an exponent of 1."""
    # The interpreter lacks libdevice's pow.
    return tl.where(exponent == 1.0, x, tl.exp2(exponent * tl.log2(x)))


@triton.jit
def get_mass(priority, alpha, eps):
    """(priority + eps)^alpha, positive for a positive base: such a leaf can be drawn. NaN for an invalid priority."""
    base = priority + eps
    mass = _power(tl.where(base > 0, base, 1.0), alpha)
    smallest = (base * 0 + 1).to(tl.int64).to(tl.float64, bitcast=True)
    mass = tl.where(mass > 0, mass, smallest)
    return tl.where(base > 0, mass, tl.where(base == 0, base, float("nan")))


@triton.jit
def _locate(ids, kind, head, is_open, slots, num_envs, alive, inside):
    """Flat slots of row ids, -1 for rows that can no longer be sampled, and the mask of ids never issued."""
    is_id = inside & (ids >= 0)
    positive = tl.where(is_id, ids, 0)
    env, row = positive % num_envs, positive // num_envs
    next_row = tl.load(head + env, is_id, other=0)
    newest = next_row - 1 + tl.load(is_open + env, is_id, other=0).to(tl.int64)
    slot = row % slots * num_envs + env
    row_kind = tl.load(kind + slot, is_id, other=0)
    is_kept = is_id & (row > newest - alive)
    never = inside & ((ids < -1) | (is_id & (row >= next_row)) | (is_kept & (row_kind == FINAL)))
    return tl.where(is_kept & (row_kind == TRANSITION) & ~never, slot, -1), never


@triton.jit
def _add_if_any(counter, which):
    number = tl.sum(which.to(tl.int64), axis=0)
    if number > 0:
        tl.atomic_add(counter, number)


@triton.jit(do_not_specialize=SIZES)
def accept_kernel(
    index, priority, touched, masses, stale, count: tl.int64, stamps, largest, faults, kind, head, is_open,
    num_leaves: tl.int64, slots: tl.int64, num_envs: tl.int64, alive: tl.int64, alpha: tl.float64, eps: tl.float64,
    BY_ID: tl.constexpr, IS_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Check the inputs, compute leaves and masses, and stamp each leaf with its last position in the input.

    Leaves, or rows by id with BY_ID, get the mass (priority + eps)^alpha; with IS_MASS priorities are masses already.
    Leaves and ids of -1 and overwritten rows are counted in `stale`. Invalid priorities and ids never issued are
    skipped and counted in `faults`. `largest` holds the bits of a float64, which sort like the float.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    leaf = tl.load(index + place, inside, other=-1)
    never = inside & (leaf >= num_leaves)
    if BY_ID:
        leaf, never = _locate(leaf, kind, head, is_open, slots, num_envs, alive, inside)
    value = tl.load(priority + place, inside, other=0).to(tl.float64)
    mass = value
    if not IS_MASS:
        mass = get_mass(value, alpha, eps)
    infinite = float("inf")
    is_valid = (value >= 0) & (value < infinite) & (mass < infinite)
    is_stored = inside & (leaf >= 0) & ~never
    accepted = is_stored & is_valid
    tl.store(touched + place, tl.where(accepted, leaf, -1), inside)
    tl.store(masses + place, mass, inside)
    tl.atomic_max(stamps + leaf, (place + 1).to(tl.int32), accepted)
    _add_if_any(stale, inside & ~is_stored)
    _add_if_any(faults + 1, never)
    if not IS_MASS:
        _add_if_any(faults, inside & ~is_valid)
        largest_here = tl.max(tl.where(accepted, value, 0.0), axis=0)
        tl.atomic_max(largest, largest_here.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=SIZES)
def set_kernel(touched, masses, count: tl.int64, leaves, stamps, dirty, BLOCK: tl.constexpr):
    """Set the masses of leaves. The last mass wins if a leaf repeats."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    leaf = tl.load(touched + place, place < count, other=-1)
    # Among all positions of a leaf only the last one matches the stamp, and it then clears the stamp.
    wins = (leaf >= 0) & (tl.load(stamps + leaf, leaf >= 0, other=0) == (place + 1).to(tl.int32))
    tl.store(leaves + leaf, tl.load(masses + place, wins, other=0.0), wins)
    tl.store(stamps + leaf, tl.zeros((BLOCK,), tl.int32), wins)
    tl.store(dirty + leaf // SUBTREE, tl.full((BLOCK,), 1, tl.uint8), wins)


@triton.jit(do_not_specialize=SIZES)
def mark_kernel(
    touched, changed, count: tl.int64, kind, leaves, dirty, largest, alpha: tl.float64, eps: tl.float64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set slots changed by a write: the mass of the largest priority for transitions, otherwise zero."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    where = tl.load(changed + place, inside, other=0) != 0
    slot = tl.load(touched + place, where, other=0)
    row_kind = tl.load(kind + slot, where, other=0)
    # A repeated slot is set to the same number twice.
    tl.store(leaves + slot, tl.where(row_kind == TRANSITION, get_mass(tl.load(largest), alpha, eps), 0.0), where)
    tl.store(dirty + slot // SUBTREE, tl.full((BLOCK,), 1, tl.uint8), where)


# Draws


@triton.jit
def _next_smaller(x):
    """The next smaller float64 of a positive x; 0 for 0."""
    bits = x.to(tl.int64, bitcast=True)
    return tl.where(x > 0, bits - 1, 0).to(tl.float64, bitcast=True)


@triton.jit
def _descend(sums, point, num_leaves, levels, root, BLOCK: tl.constexpr):
    """Leaves that contain points [BLOCK] of the total: at each level the first child whose sum exceeds the point.

    A child of zero is never the first. Rounding may put a point at or past the end of a node: it is then moved to just
    before the end.
    """
    node = tl.zeros((BLOCK,), tl.int64)
    first = (root + 1) // 16  # index after the last node
    for i in range(levels):
        shift = 4 * (levels - i)
        nodes = (num_leaves + (num_leaves * 0 + 1 << shift) - 1) >> shift
        first -= nodes
        node = tl.minimum(node, nodes - 1)  # has an effect only if sums are wrong or all zero
        at = (first + node) * 16
        ends = tl.load(sums + at[:, None] + tl.arange(0, 16)[None, :])
        inside = tl.minimum(point, _next_smaller(tl.max(ends, axis=1)))
        passed = ends <= inside[:, None]
        point = inside - tl.max(tl.where(passed, ends, 0.0), axis=1)
        node = node * 16 + tl.minimum(tl.sum(passed.to(tl.int64), axis=1), 15)
    return tl.minimum(node, num_leaves - 1)


@triton.jit
def _weight(smallest, priority, beta):
    """(smallest / priority)^beta, in (0, 1]."""
    ratio = smallest / priority
    weight = tl.exp2(beta * tl.log2(tl.where(ratio > 0, ratio, 1.0)))
    # The ratio may underflow in float64, and its power in float32.
    weight = tl.where(ratio > 0, weight, tl.where(beta > 0, ratio, 1.0))
    return tl.where(weight < MIN_WEIGHT, MIN_WEIGHT, weight).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def prioritized_draw_kernel(
    drawn, priorities, weights, start: tl.int64, rows: tl.int64, count: tl.int64, beta: tl.float64,
    stream, leaves, sums, least, faults, num_leaves: tl.int64, levels: tl.int64, root: tl.int64, size: tl.int64,
    IS_WEIGHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw leaves [rows] with their priorities, one from each of `count` equal slices of the total, from `start` on.

    IS_WEIGHED also computes weights relative to the smallest of all priorities.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows
    call = load_calls(stream, place, inside)
    bits, _ = random_pair(tl.load(stream), call, place, 0)
    # The second term has 53 random bits: a number in [0, 1).
    share = (start + place).to(tl.float64) + (bits >> 10).to(tl.float64) * 1.1102230246251565e-16
    is_tiny = tl.load(sums + root) < TINY_TOTAL
    own = sums + tl.where(is_tiny, size, 0)
    total = tl.load(own + root)
    leaf = _descend(own, share * (total / count), num_leaves, levels, root, BLOCK)
    priority = tl.load(leaves + leaf, inside, other=float("inf"))
    tl.store(drawn + place, leaf, inside)
    tl.store(priorities + place, priority, inside)
    if IS_WEIGHED:
        tl.store(weights + place, _weight(tl.load(least + (root + 1) // 16 - 1), priority, beta), inside)
    if (tl.program_id(0) == 0) & (start == 0) & ~(total > 0):
        tl.store(faults + 2, tl.load(faults + 2) + 1)
    count_calls(stream, place, call, inside)


@triton.jit(do_not_specialize=SIZES)
def weigh_kernel(priorities, weights, count: tl.int64, beta: tl.float64, BLOCK: tl.constexpr):
    """Compute weights relative to the smallest drawn priority, which every program searches."""
    smallest = tl.full((BLOCK,), float("inf"), tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        smallest = tl.minimum(smallest, tl.load(priorities + place, place < count, other=float("inf")))
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    priority = tl.load(priorities + place, place < count, other=1.0)
    tl.store(weights + place, _weight(tl.min(smallest, axis=0), priority, beta), place < count)


_SIZES = {"num_leaves": "i64", "size": "i64"}
_TREE = {"leaves": "*fp64", "sums": "*fp64", "least": "*fp64", "dirty": "*u8", **_SIZES}
_RENEW_TOP_TYPES = {"sums": "*fp64", "least": "*fp64", **_SIZES, "levels": "i64"}
_RATES = {"alpha": "fp64", "eps": "fp64"}
_ACCEPT = {
    "index": "*i64", "priority": "*fp32", "touched": "*i64", "masses": "*fp64", "stale": "*i64", "count": "i64",
    "stamps": "*i32", "largest": "*i64", "faults": "*i64", "kind": "*u8", "head": "*i64", "is_open": "*i1",
    "num_leaves": "i64", "slots": "i64", "num_envs": "i64", "alive": "i64", **_RATES,
}  # fmt: skip
_SET = {
    "touched": "*i64", "masses": "*fp64", "count": "i64", "leaves": "*fp64", "stamps": "*i32", "dirty": "*u8",
}  # fmt: skip
_MARK = {
    "touched": "*i64", "changed": "*u8", "count": "i64", "kind": "*u8", "leaves": "*fp64", "dirty": "*u8",
    "largest": "*fp64", **_RATES,
}  # fmt: skip
_DRAW = {
    "drawn": "*i64", "priorities": "*fp64", "weights": "*fp32", "start": "i64", "rows": "i64", "count": "i64",
    "beta": "fp64", "stream": "*i64", "leaves": "*fp64", "sums": "*fp64", "least": "*fp64", "faults": "*i64",
    "num_leaves": "i64", "levels": "i64", "root": "i64", "size": "i64",
}  # fmt: skip
_WEIGH = {"priorities": "*fp64", "weights": "*fp32", "count": "i64", "beta": "fp64"}


def _accept(name: str, by_id: bool, is_mass: bool, given: str) -> Variant:
    constants = {"BY_ID": by_id, "IS_MASS": is_mass, "BLOCK": BLOCK}
    return Variant(accept_kernel, name, _ACCEPT | {"priority": given}, constants, OPTIONS)


VARIANTS = (
    _accept("by id, float32", True, False, "*fp32"),
    _accept("by leaf, masses", False, True, "*fp64"),
    Variant(set_kernel, "256 leaves", _SET, {"BLOCK": BLOCK}, OPTIONS),
    Variant(mark_kernel, "of a write", _MARK, {"BLOCK": BLOCK}, OPTIONS),
    Variant(renew_kernel, "4,096 leaves", _TREE, {"LEVELS": 3, "LEAST": False}, OPTIONS),
    Variant(renew_kernel, "4,096 leaves, minima", _TREE, {"LEVELS": 3, "LEAST": True}, OPTIONS),
    Variant(renew_top_kernel, "minima", _RENEW_TOP_TYPES, {"LEAST": True, "BLOCK": BLOCK}, TOP_OPTIONS),
    *(
        Variant(prioritized_draw_kernel, name, _DRAW, {"IS_WEIGHED": by_all, "BLOCK": DRAW_BLOCK}, OPTIONS)
        for name, by_all in (("leaves only", False), ("weights by all", True))
    ),
    Variant(weigh_kernel, "of a batch", _WEIGH, {"BLOCK": BLOCK}, OPTIONS),
)
