"""The tree of priorities on a device: setting, marking and drawing, one launch each.

Leaves are float64. Above them every node has the running sums of its 16 children, added from left to right: one line of
memory that a draw compares its point with. Levels follow each other from the lowest one on; a node of level l is over
16^l leaves, and the top level is one node. Sums are never corrected by differences and never added by atomics: every
node above a changed leaf is computed again from its children, so the same updates give the same bits.

Leaves are multiplied by a power of two before they are summed, as in the native core: in the usual scale sums cannot
overflow, in the faint one denormal leaves keep their digits. Which one is in use is decided on the device.

Changes are made by one program, with a barrier after each level; draws by as many programs as their rows need. What an
atomic has written is read by atomics only, which go past the nearest cache.
"""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton
import triton.language as tl

from relive.kernels.triton.philox import count_call, random_pair
from relive.kernels.triton.slots import FINAL, TRANSITION
from relive.kernels.triton.variants import Variant

USUAL = tl.constexpr(2.0**-64)
FAINT = tl.constexpr(2.0**512)
TOO_SMALL = tl.constexpr(2.0**-800)
"""A usual total below this may be a sum of faint leaves."""
TOO_LARGE = tl.constexpr(2.0**300)
"""A faint total above this is summed in the usual scale again."""
TINY = tl.constexpr(2.0**-700)
"""Under a usual total that is too small all leaves are below this."""
LEAST_WEIGHT = tl.constexpr(2.0**-126)
"""The smallest normal float32: a weight of zero would hide the row."""
NOTHING_DRAWN = 0x7FF0000000000000
"""The bits of infinity, which those of every priority are below."""

BLOCK = 512
OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}
"""Of kernels of one program: a thread for each changed leaf."""
DRAW_BLOCK = 32
DRAW_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


# Sums


@triton.jit
def _renew_nodes(children, step, factor, least_children, entries, nodes, least, group, where, LEAST: tl.constexpr):
    """The running sums of these nodes again, and the smallest positive leaf under each."""
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
            found = tl.load(least_children + child, where & (child < entries), other=0.0)
            smallest = tl.where((found > 0) & (found < smallest), found, smallest)
        tl.store(least + group, smallest, where)


@triton.jit
def _renew_levels(leaves, sums, least, touched, count, num_leaves, levels, scale, LEAST: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Every node above the touched leaves again; where a level has fewer nodes than were touched, all of them."""
    children, least_children = leaves, leaves
    step, nodes, width = num_leaves * 0 + 1, num_leaves * 0, num_leaves * 0 + 16
    entries, factor = num_leaves, scale
    for _ in range(levels):
        tl.debug_barrier()
        groups = (entries + 15) // 16
        todo = tl.minimum(groups, count)
        for start in range(0, todo, BLOCK):
            group = start + tl.arange(0, BLOCK).to(tl.int64)
            inside = group < todo
            if groups > count:
                leaf = tl.load(touched + group, inside, other=-1)
                inside = inside & (leaf >= 0)
                group = leaf // width
            _renew_nodes(
                children, step, factor, least_children, entries, sums + nodes * 16, least + nodes, group, inside, LEAST
            )
        children, least_children = sums + nodes * 16 + 15, least + nodes
        step, factor = step * 0 + 16, scale * 0 + 1.0
        nodes, entries, width = nodes + groups, groups, width * 16


@triton.jit
def _renew_above(leaves, sums, least, state, touched, count, num_leaves, levels, root, scale, LEAST: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Bring the sums up to date with the touched leaves; all sums, if their total asks for another scale."""
    todo, turn = count, 1
    while turn > 0:
        _renew_levels(leaves, sums, least, touched, todo, num_leaves, levels, scale, LEAST, BLOCK)
        tl.debug_barrier()
        total, has_tiny = tl.load(sums + root), tl.load(state + 1)
        fades = (scale == USUAL) & (has_tiny > 0) & (total < TOO_SMALL) & (turn == 1)
        vanishes = (scale == FAINT) & ~(total > 0)  # all zero, in either scale
        grows = (scale == FAINT) & ~(total <= TOO_LARGE) & (turn == 1)
        tl.debug_barrier()
        if vanishes:
            tl.store(state + 1, total * 0)
        scale = tl.where(fades, FAINT, tl.where(grows | vanishes, USUAL, scale))
        tl.store(state, scale)
        turn = tl.where(fades | grows, 2, 0)
        todo = num_leaves


@triton.jit
def rebuild_kernel(
    leaves, sums, least, state, stamps, num_leaves: tl.int64, levels, root: tl.int64,
    LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up everything again from the leaves."""
    scale = tl.full((), USUAL, tl.float64)
    tl.store(state + 1, scale * 0 + 1.0)  # there may be a tiny leaf, as far as is known
    # With as many touched leaves as there are leaves the list of them, here any memory, is not read.
    _renew_above(leaves, sums, least, state, stamps, num_leaves, num_leaves, levels, root, scale, LEAST, BLOCK)


# Changes


@triton.jit
def _power(x, exponent):
    """x^exponent of float64 above zero, exactly x for an exponent of 1."""
    # libdevice's pow is unknown to the interpreter.
    return tl.where(exponent == 1.0, x, tl.exp2(exponent * tl.log2(x)))


@triton.jit
def mass_of(priority, alpha, eps):
    """(priority + eps)^alpha, but zero only for zero: what is positive can be drawn. Of no priority it is NaN."""
    base = priority + eps
    mass = _power(tl.where(base > 0, base, 1.0), alpha)
    smallest = (base * 0 + 1).to(tl.int64).to(tl.float64, bitcast=True)
    mass = tl.where(mass > 0, mass, smallest)
    return tl.where(base > 0, mass, tl.where(base == 0, base, float("nan")))


@triton.jit
def _located(ids, kind, head, is_open, slots, num_envs, alive, inside):
    """The flat slots of row ids, -1 for rows that can no longer be drawn, and which ids were never given."""
    known = inside & (ids >= 0)
    positive = tl.where(known, ids, 0)
    env, row = positive % num_envs, positive // num_envs
    next_row = tl.load(head + env, known, other=0)
    newest = next_row - 1 + tl.load(is_open + env, known, other=0).to(tl.int64)
    slot = row % slots * num_envs + env
    held = tl.load(kind + slot, known, other=0)
    is_kept = known & (row > newest - alive)
    never = inside & ((ids < 0) | (row >= next_row) | (is_kept & (held == FINAL)))
    return tl.where(is_kept & (held == TRANSITION) & ~never, slot, -1), never


@triton.jit
def _accept(
    index, priority, touched, masses, stale, state, stamps, largest, faults, kind, head, is_open,
    count, num_leaves, slots, num_envs, alive, alpha, eps,
    BY_ID: tl.constexpr, IS_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Check what is given, note leaves and masses, and let each leaf remember the last place that it comes at."""
    gone = tl.full((), 0, tl.int64)
    bad = gone
    foreign = gone
    tiny = gone
    most = tl.load(largest)
    tl.debug_barrier()  # every warp has read it
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = place < count
        leaf = tl.load(index + place, inside, other=-1)
        never = inside & (leaf >= num_leaves)
        if BY_ID:
            leaf, never = _located(leaf, kind, head, is_open, slots, num_envs, alive, inside)
        value = tl.load(priority + place, inside, other=0).to(tl.float64)
        mass = value
        if not IS_MASS:
            mass = mass_of(value, alpha, eps)
        infinite = float("inf")
        is_one = (value >= 0) & (value < infinite) & (mass < infinite)
        found = inside & (leaf >= 0) & ~never
        accepted = found & is_one
        gone += tl.sum((inside & ~found).to(tl.int64), axis=0)
        bad += tl.sum((inside & ~is_one).to(tl.int64), axis=0)
        foreign += tl.sum(never.to(tl.int64), axis=0)
        tiny += tl.sum((accepted & (mass > 0) & (mass < TINY)).to(tl.int64), axis=0)
        most = tl.maximum(most, tl.max(tl.where(accepted, value, 0.0), axis=0))
        tl.store(touched + place, tl.where(accepted, leaf, -1), inside)
        tl.store(masses + place, mass, inside)
        tl.atomic_max(stamps + leaf, (place + 1).to(tl.int32), accepted)
    tl.store(stale, gone)
    if tiny > 0:
        tl.store(state + 1, most * 0 + 1.0)
    if not IS_MASS:
        tl.store(largest, most)
        tl.store(faults, tl.load(faults) + bad)
    tl.store(faults + 1, tl.load(faults + 1) + foreign)


@triton.jit
def update_kernel(
    index, priority, touched, masses, stale, leaves, sums, least, state, stamps, largest, faults, kind, head, is_open,
    count: tl.int64, num_leaves: tl.int64, levels, root: tl.int64,
    slots: tl.int64, num_envs: tl.int64, alive: tl.int64,
    alpha: tl.float64, eps: tl.float64,
    BY_ID: tl.constexpr, IS_MASS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give leaves, or the rows of ids, the mass (priority + eps)^alpha; of a leaf that comes twice the last one counts.

    Leaves of -1 and rows that are gone are counted in `stale`. Priorities that are none, and ids that were never given,
    are skipped and added to `faults`. With IS_MASS priorities are masses already.
    """
    scale = tl.load(state)
    _accept(
        index, priority, touched, masses, stale, state, stamps, largest, faults, kind, head, is_open,
        count, num_leaves, slots, num_envs, alive, alpha, eps, BY_ID, IS_MASS, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        leaf = tl.load(touched + place, place < count, other=-1)
        # Of all lanes with this leaf one finds its own stamp, and takes it away: zero is less than every stamp.
        last = tl.atomic_max(stamps + leaf, tl.zeros((BLOCK,), tl.int32), leaf >= 0)
        wins = (leaf >= 0) & (last == (place + 1).to(tl.int32))
        tl.store(leaves + leaf, tl.load(masses + place, wins, other=0.0), wins)
    tl.debug_barrier()
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        leaf = tl.load(touched + place, place < count, other=-1)
        tl.store(stamps + leaf, tl.zeros((BLOCK,), tl.int32), leaf >= 0)
    _renew_above(leaves, sums, least, state, touched, count, num_leaves, levels, root, scale, LEAST, BLOCK)


@triton.jit
def mark_kernel(
    touched, changed, kind, leaves, sums, least, state, largest,
    count: tl.int64, num_leaves: tl.int64, levels, root: tl.int64,
    alpha: tl.float64, eps: tl.float64,
    LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give the slots that a write has changed the mass of the largest priority, or zero where no transition is left."""
    scale = tl.load(state)
    mass = mass_of(tl.load(largest), alpha, eps)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        slot = tl.load(touched + place, place < count, other=0)
        where = tl.load(changed + place, place < count, other=0) != 0
        held = tl.load(kind + slot, where, other=0)
        # A slot that comes twice is given the same number twice.
        tl.store(leaves + slot, tl.where(held == TRANSITION, mass, 0.0), where)
    if (mass > 0) & (mass < TINY):
        tl.store(state + 1, mass * 0 + 1.0)
    _renew_above(leaves, sums, least, state, touched, count, num_leaves, levels, root, scale, LEAST, BLOCK)


# Draws


@triton.jit
def _just_below(x):
    """The next smaller float64 of a positive one; zero of zero."""
    bits = x.to(tl.int64, bitcast=True)
    return tl.where(x > 0, bits - 1, 0).to(tl.float64, bitcast=True)


@triton.jit
def _descend(sums, point, num_leaves, levels, root, BLOCK: tl.constexpr):
    """The leaves that points [BLOCK] of the total fall into: at each level the first child that ends after the point.

    A child of zero does not end later than the one before it, so it is never the first. Rounding may put a point at
    the end of a node or past it: it is then moved to just before the end.
    """
    node = tl.zeros((BLOCK,), tl.int64)
    first = (root + 1) // 16  # one past the last node
    for i in range(levels):
        shift = (4 * (levels - i)).to(tl.int64)
        nodes = (num_leaves + (num_leaves * 0 + 1 << shift) - 1) >> shift
        first -= nodes
        node = tl.minimum(node, nodes - 1)  # only if sums are wrong, or all zero
        at = (first + node) * 16
        ends = tl.load(sums + at[:, None] + tl.arange(0, 16)[None, :])
        inside = tl.minimum(point, _just_below(tl.max(ends, axis=1)))
        passed = ends <= inside[:, None]
        point = inside - tl.max(tl.where(passed, ends, 0.0), axis=1)
        node = node * 16 + tl.minimum(tl.sum(passed.to(tl.int64), axis=1), 15)
    return tl.minimum(node, num_leaves - 1)


@triton.jit
def _weight(smallest, priority, beta):
    """(smallest / priority)^beta, in (0, 1]."""
    ratio = smallest / priority
    weight = tl.exp2(beta * tl.log2(tl.where(ratio > 0, ratio, 1.0)))
    # A ratio may be too small for a float64, as its power may be for a float32.
    weight = tl.where(ratio > 0, weight, tl.where(beta > 0, ratio, 1.0))
    return tl.where(weight < LEAST_WEIGHT, LEAST_WEIGHT, weight).to(tl.float32)


@triton.jit
def prioritized_draw_kernel(
    stream, leaves, sums, least, smallest, faults, drawn, priorities, weights,
    count: tl.int64, num_leaves: tl.int64, levels, root: tl.int64,
    beta: tl.float64,
    NORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Leaves [count], the i-th from the i-th of `count` equal slices of the total, and their priorities.

    NORMALIZE "global" gives weights too, "batch" leaves the smallest priority in `smallest` for `weigh_kernel`.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key, call = tl.load(stream), tl.load(stream + 1)
    bits, _ = random_pair(key, call, place, place * 0)
    share = place.to(tl.float64) + (bits >> 10).to(tl.float64) * 1.1102230246251565e-16  # 53 bits: exactly u in [0, 1)
    total = tl.load(sums + root)
    point = share * (total / count)
    leaf = _descend(sums, point, num_leaves, levels, root, BLOCK)
    priority = tl.load(leaves + leaf, inside, other=float("inf"))
    tl.store(drawn + place, leaf, inside)
    tl.store(priorities + place, priority, inside)
    if NORMALIZE == "global":
        tl.store(weights + place, _weight(tl.load(least + (root + 1) // 16 - 1), priority, beta), inside)
    if NORMALIZE == "batch":
        # Bits of floats that are not negative sort like the floats.
        tl.atomic_min(smallest, tl.min(priority, axis=0).to(tl.int64, bitcast=True))
    if (tl.program_id(0) == 0) & ~(total > 0):
        tl.store(faults + 2, tl.load(faults + 2) + 1)
    count_call(stream, call)


@triton.jit
def weigh_kernel(priorities, smallest, weights, count: tl.int64, beta: tl.float64,
                 NOTHING: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The weights of drawn priorities by the smallest of them, which is forgotten by the last program."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    least = tl.load(smallest).to(tl.float64, bitcast=True)
    priority = tl.load(priorities + place, place < count, other=1.0)
    tl.store(weights + place, _weight(least, priority, beta), place < count)
    tl.debug_barrier()  # each warp has read the smallest
    done = tl.atomic_add(smallest + 1, tl.full((), 1, tl.int64))
    if done == tl.num_programs(0) - 1:
        tl.store(smallest, tl.full((), NOTHING, tl.int64))
        tl.store(smallest + 1, tl.full((), 0, tl.int64))


_TREE = {"leaves": "*fp64", "sums": "*fp64", "least": "*fp64", "state": "*fp64"}
_SIZES = {"num_leaves": "i64", "levels": "i32", "root": "i64"}
_LISTS = {"index": "*i64", "priority": "*fp32", "touched": "*i64", "masses": "*fp64", "stale": "*i64"}
_RING = {"kind": "*u8", "head": "*i64", "is_open": "*i1"}
_RATES = {"alpha": "fp64", "eps": "fp64"}
_UPDATE = {
    **_LISTS, **_TREE, "stamps": "*i32", "largest": "*fp64", "faults": "*i64", **_RING, "count": "i64", **_SIZES,
    "slots": "i64", "num_envs": "i64", "alive": "i64", **_RATES,
}  # fmt: skip
_MARK = {
    "touched": "*i64", "changed": "*u8", "kind": "*u8", **_TREE, "largest": "*fp64", "count": "i64", **_SIZES, **_RATES,
}  # fmt: skip
_DRAW = {
    "stream": "*i64", "leaves": "*fp64", "sums": "*fp64", "least": "*fp64", "smallest": "*i64", "faults": "*i64",
    "drawn": "*i64", "priorities": "*fp64", "weights": "*fp32", "count": "i64", **_SIZES, "beta": "fp64",
}  # fmt: skip
_WEIGH = {"priorities": "*fp64", "smallest": "*i64", "weights": "*fp32", "count": "i64", "beta": "fp64"}


def _update(name: str, by_id: bool, is_mass: bool, least: bool, given: str) -> Variant:
    constants = {"BY_ID": by_id, "IS_MASS": is_mass, "LEAST": least, "BLOCK": BLOCK}
    return Variant(update_kernel, name, _UPDATE | {"priority": given}, constants, OPTIONS)


VARIANTS = (
    _update("by id, float32", True, False, False, "*fp32"),
    _update("by id, float32, minima", True, False, True, "*fp32"),
    _update("by leaf, masses, minima", False, True, True, "*fp64"),
    Variant(mark_kernel, "of a write", _MARK, {"LEAST": False, "BLOCK": BLOCK}, OPTIONS),
    Variant(mark_kernel, "of a write, minima", _MARK, {"LEAST": True, "BLOCK": BLOCK}, OPTIONS),
    Variant(
        rebuild_kernel, "minima", _TREE | {"stamps": "*i32"} | _SIZES, {"LEAST": True, "BLOCK": BLOCK}, OPTIONS
    ),
    *(
        Variant(prioritized_draw_kernel, name, _DRAW, {"NORMALIZE": by, "BLOCK": DRAW_BLOCK}, DRAW_OPTIONS)
        for name, by in (("leaves only", "none"), ("weights by the batch", "batch"), ("weights by all", "global"))
    ),
    Variant(weigh_kernel, "of a batch", _WEIGH, {"NOTHING": NOTHING_DRAWN, "BLOCK": BLOCK}, OPTIONS),
)  # fmt: skip
