"""Writing of steps into the rings of environments: one launch per step or block of steps.

Each program owns a few environments, so no two programs write the same row, and loops over the steps of a block. In
each step a program first reads the state (heads, kinds, pending observations), then passes a barrier, then writes, so
that all warps read the same state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from relive.kernels.triton.draw import envs_per_group
from relive.kernels.triton.launching import INTERPRETED, SIZES, BoundKernel, as_words, split_into_programs
from relive.kernels.triton.rings import (
    FINAL,
    FRAMES,
    HISTORY,
    MAX_COLUMNS,
    PENDING,
    TILE,
    TRANSITION,
    WIDTH,
    ZERO,
    Leaf,
    LeafLayout,
    Rings,
    find_frame,
    get_slot,
    step_back,
    step_forward,
)

GROUPS = tl.constexpr(3)
"""Number of slots that a step of an environment may change."""
MAX_NARROW = 256
"""Maximum number of words per row for which a program handles several environments."""


@triton.jit
def _load_input(base, item, column, frame, mask, LAYOUT: tl.constexpr):
    """Load the words [E, C] of one frame of the items [E] that the caller passed."""
    word = find_frame(column, frame, LAYOUT)
    inside = mask[:, None] & (column < LAYOUT[WIDTH])[None, :]
    return tl.load(base + item[:, None] * (LAYOUT[WIDTH] * LAYOUT[FRAMES]) + word[None, :], inside, other=0)


@triton.jit
def _make_zeros(item, LAYOUT: tl.constexpr):
    """Return zeros, int32 [E, C]. The function tl.zeros of Triton 3.4 does not accept elements of a constexpr tuple."""
    return (item[:, None] * 0 + tl.arange(0, LAYOUT[TILE])[None, :] * 0).to(tl.int32)


@triton.jit
def _find_differing(stored, inputs, first, pending, item, valid, num_envs, size, LAYOUT: tl.constexpr):
    """Return whether each passed observation differs in any bit from the observation of its pending row: int32 [E]."""
    differs = _make_zeros(pending, LAYOUT)
    for start in range(0, LAYOUT[WIDTH], LAYOUT[TILE]):
        column = start + tl.arange(0, LAYOUT[TILE])
        inside = valid[:, None] & (column < LAYOUT[WIDTH])[None, :]
        frame_slot = pending
        has_started = pending < 0
        for age in range(LAYOUT[FRAMES]):
            stored_words = tl.load(stored + frame_slot[:, None] * LAYOUT[WIDTH] + column[None, :], inside, other=0)
            if LAYOUT[ZERO]:
                stored_words = tl.where(has_started[:, None], 0, stored_words)
            input_words = _load_input(inputs, item, column, LAYOUT[FRAMES] - 1 - age, valid, LAYOUT)
            differs |= (stored_words != input_words).to(tl.int32)
            if LAYOUT[FRAMES] > 1:
                has_started |= tl.load(first + frame_slot, valid, other=0) != 0
                frame_slot = tl.where(has_started, frame_slot, step_back(frame_slot, 1, num_envs, size))
    return tl.max(differs, axis=1)


@triton.jit
def _count_invalid_stacks(inputs, next_inputs, item, valid, continues, is_reset, LAYOUT: tl.constexpr):
    """Count the steps whose stacks cannot be rebuilt from single frames."""
    is_unpadded = _make_zeros(item, LAYOUT)
    is_unfollowed = is_unpadded
    for start in range(0, LAYOUT[WIDTH], LAYOUT[TILE]):
        column = start + tl.arange(0, LAYOUT[TILE])
        newest = _load_input(inputs, item, column, LAYOUT[FRAMES] - 1, valid, LAYOUT)
        younger_words = newest
        padding = newest
        if LAYOUT[ZERO]:
            padding = newest * 0
        for age in range(1, LAYOUT[FRAMES]):
            words = _load_input(inputs, item, column, LAYOUT[FRAMES] - 1 - age, valid, LAYOUT)
            is_unpadded |= (words != padding).to(tl.int32)
            next_words = _load_input(next_inputs, item, column, LAYOUT[FRAMES] - 1 - age, valid, LAYOUT)
            is_unfollowed |= (next_words != younger_words).to(tl.int32)
            younger_words = words
    is_unpadded, is_unfollowed = tl.max(is_unpadded, axis=1) > 0, tl.max(is_unfollowed, axis=1) > 0
    is_invalid = valid & ~is_reset & ((~continues & is_unpadded) | is_unfollowed)
    return tl.sum(is_invalid.to(tl.int64), axis=0)


@triton.jit
def _store_items(stored, slot, inputs, item, mask, LAYOUT: tl.constexpr):
    """Copy items to slots. If an item is a stack of frames, only its newest frame is stored."""
    for start in range(0, LAYOUT[WIDTH], LAYOUT[TILE]):
        column = start + tl.arange(0, LAYOUT[TILE])
        words = _load_input(inputs, item, column, LAYOUT[FRAMES] - 1, mask, LAYOUT)
        inside = mask[:, None] & (column < LAYOUT[WIDTH])[None, :]
        tl.store(stored + slot[:, None] * LAYOUT[WIDTH] + column[None, :], words, inside)


@triton.jit
def _find_expiring_slots(kind, row, slot, mask, slots, num_envs, size, num_sampleable):
    """Return the slots that can no longer be sampled when `slot` becomes the newest, and the mask of transitions."""
    expiring = step_forward(slot, slots - num_sampleable, num_envs, size)
    row_kind = tl.load(kind + expiring, mask, other=0)
    return expiring, mask & (row >= num_sampleable) & (row_kind == TRANSITION)


@triton.jit
def _store_leaves(leaves, slot, inputs, item, mask, LAYOUTS: tl.constexpr):
    for i in tl.static_range(len(LAYOUTS)):
        _store_items(leaves[i], slot, inputs[i], item, mask, tl.constexpr(LAYOUTS[i]))


@triton.jit
def _find_continuing_items(
    obs, inputs, next_inputs, first, pending, item, valid, has_pending, is_reset, broken, num_envs, size,
    OBS: tl.constexpr,
):  # fmt: skip
    """Return the mask of steps that start with the pending observation, and count stacks that cannot be rebuilt."""
    differs = valid.to(tl.int32) * 0
    for i in tl.static_range(len(OBS)):
        differs |= _find_differing(obs[i], inputs[i], first, pending, item, valid, num_envs, size, tl.constexpr(OBS[i]))
    continues = has_pending & (differs == 0)
    for i in tl.static_range(len(OBS)):
        if OBS[i][FRAMES] > 1:
            count = _count_invalid_stacks(
                inputs[i], next_inputs[i], item, valid, continues, is_reset, tl.constexpr(OBS[i])
            )
            tl.atomic_add(broken, count)
    return continues


@triton.jit
def _load_ends(terminated, truncated, item, valid):
    return (tl.load(terminated + item, valid, other=0) | tl.load(truncated + item, valid, other=0)) != 0


@triton.jit
def _make_bytes_like(like, number):
    return (like * 0 + number).to(tl.uint8)


@triton.jit
def _store_changes(
    changed_slots, is_changed, item, steps, writers, inside,
    expiring, expires, slot, is_new, next_expiring, next_expires,
):  # fmt: skip
    """Store the slots that became transitions or are no longer transitions."""
    for i in tl.static_range(GROUPS):
        position = item + (item * 0 + i) * steps * writers
        slots = expiring if i == 0 else slot if i == 1 else next_expiring
        flags = expires if i == 0 else is_new if i == 1 else next_expires
        tl.store(changed_slots + position, slots, inside)
        tl.store(is_changed + position, flags.to(tl.uint8), inside)


@triton.jit
def _store_state(head, is_open, count, totals, env, row, has_pending, old_count, new_count, valid, GROUP: tl.constexpr):
    """Store the state of the rings, and update the totals of groups."""
    tl.store(head + env, row, valid)
    tl.store(is_open + env, has_pending.to(tl.uint8), valid)
    tl.store(count + env, new_count, valid)
    tl.atomic_add(totals + env // GROUP, new_count - old_count, valid & (new_count != old_count))


@triton.jit
def _load_envs(envs, position, valid, num_envs, unknown_envs):
    """Return the numbers of environments and the mask of valid numbers, and count the invalid ones."""
    env = tl.load(envs + position, valid, other=0)
    is_unknown = valid & ((env < 0) | (env >= num_envs))
    num_unknown = tl.sum(is_unknown.to(tl.int64), axis=0)
    if num_unknown > 0:
        tl.atomic_add(unknown_envs, num_unknown)
    return tl.where(is_unknown, 0, env), valid & ~is_unknown


@triton.jit(do_not_specialize=SIZES)
def write_kernel(
    input_obs, input_next_obs, input_rest, envs, changed_slots, is_changed, writers: tl.int32, steps: tl.int32,
    obs, next_obs, rest, kind, first, head, is_open, resetting, count, totals, broken, unknown_envs,
    slots: tl.int64, num_envs: tl.int64, size: tl.int64, num_sampleable: tl.int64,
    OBS: tl.constexpr, REST: tl.constexpr, TERMINATED: tl.constexpr, TRUNCATED: tl.constexpr,
    NEXT_STEP: tl.constexpr, STORES_NEXT_OBS: tl.constexpr, HAS_ENVS: tl.constexpr, TRACKS_CHANGES: tl.constexpr,
    HAS_HISTORY: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store steps [steps, writers] of all environments or of `envs`; invalid environments are skipped."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = position < writers
    env = position
    if HAS_ENVS:
        env, valid = _load_envs(envs, position, valid, num_envs, unknown_envs)
    row = tl.load(head + env, valid, other=0)
    has_pending = tl.load(is_open + env, valid, other=0) != 0
    is_reset = (tl.load(resetting + env, valid, other=0) != 0) if NEXT_STEP else position < 0
    old_count = tl.load(count + env, valid, other=0)
    new_count = old_count
    for t in range(steps):
        item = (tl.full((), 0, tl.int64) + t) * writers + position
        pending = get_slot(row, env, slots, num_envs)
        continues = _find_continuing_items(
            obs, input_obs, input_next_obs, first, pending, item, valid, has_pending, is_reset, broken, num_envs, size,
            OBS,
        )  # fmt: skip
        is_cut = valid & has_pending & ~is_reset & ~continues
        starts = valid & (~has_pending | is_cut)
        row += is_cut.to(tl.int64)
        slot = tl.where(is_cut, step_forward(pending, 1, num_envs, size), pending)
        next_slot = step_forward(slot, 1, num_envs, size)
        expiring, expires = _find_expiring_slots(kind, row, slot, starts, slots, num_envs, size, num_sampleable)
        # With stored next observations a step writes one row and no pending row, so only one old row expires.
        has_next = valid & (position < 0) if STORES_NEXT_OBS else valid
        next_expiring, next_expires = _find_expiring_slots(
            kind, row + 1, next_slot, has_next, slots, num_envs, size, num_sampleable
        )
        ends = _load_ends(input_rest[TERMINATED], input_rest[TRUNCATED], item, valid) & ~is_reset
        is_closed = position < 0 if NEXT_STEP or STORES_NEXT_OBS else ends
        tl.debug_barrier()
        if HAS_HISTORY:
            tl.store(kind + expiring, _make_bytes_like(env, HISTORY), expires)
            tl.store(kind + next_expiring, _make_bytes_like(env, HISTORY), next_expires)
            # With one row of history, `expiring` and `next_slot` are the same slot, so the stores must stay in order.
            tl.debug_barrier()
        tl.store(kind + pending, _make_bytes_like(env, FINAL), is_cut)
        tl.store(kind + slot, tl.where(is_reset, FINAL, TRANSITION).to(tl.uint8), valid)
        tl.store(first + slot, _make_bytes_like(env, 1), starts)
        _store_leaves(obs, slot, input_obs, item, starts, OBS)
        _store_leaves(rest, slot, input_rest, item, valid, REST)
        if not STORES_NEXT_OBS:
            tl.store(first + next_slot, is_reset.to(tl.uint8), valid)
            tl.store(kind + next_slot, tl.where(is_closed, FINAL, PENDING).to(tl.uint8), valid)
            has_pending = ~is_closed
            _store_leaves(obs, next_slot, input_next_obs, item, valid, OBS)
        else:
            _store_leaves(next_obs, slot, input_next_obs, item, valid, OBS)
        if TRACKS_CHANGES:
            _store_changes(
                changed_slots, is_changed, item, steps, writers, position < writers,
                expiring, expires, slot, valid & ~is_reset, next_expiring, next_expires,
            )  # fmt: skip
        new_count += (~is_reset).to(tl.int64) - expires.to(tl.int64) - next_expires.to(tl.int64)
        row += 1 + is_closed.to(tl.int64)
        is_reset = ends if NEXT_STEP else is_reset
        tl.debug_barrier()
    _store_state(head, is_open, count, totals, env, row, has_pending, old_count, new_count, valid, GROUP)
    tl.store(resetting + env, is_reset.to(tl.uint8), valid & NEXT_STEP)


InputLeaves = tuple[torch.Tensor, ...]
"""Leaves of the steps to write, as contiguous tensors."""


def _choose_tiles(layouts: Sequence[LeafLayout], per_program: int) -> tuple[LeafLayout, ...]:
    """Return the layouts with the widest tiles that `per_program` environments per program allow."""
    max_words = MAX_COLUMNS if INTERPRETED else min(1024 // per_program, 512)
    tiles = []
    for width, _, k, inner, _ in layouts:
        # Frames that are stacked along the last axis are interleaved, so their tiles are half as wide.
        is_interleaved = k > 1 and inner == 1
        tiles.append(min(triton.next_power_of_2(max(width, 1)), max_words // 2 if is_interleaved else max_words))
    return tuple((layout[0], tile, *layout[2:]) for layout, tile in zip(layouts, tiles, strict=True))


def _use_int64_words(leaf: Leaf) -> Leaf:
    """View a leaf of wide rows as words of eight bytes, if each row and each stacked frame has a multiple of eight."""
    width, _, k, inner, zero = leaf.layout
    size = leaf.words.element_size()
    if width * k <= MAX_NARROW or width * size % 8 or (k > 1 and inner * size % 8):
        return leaf
    words = width * size // 8
    int64_words = as_words(leaf.words, torch.empty(0, dtype=torch.int64, device="cpu"))
    return Leaf(int64_words, (words, words, k, inner * size // 8, zero))


class StepWriter:
    """Writes steps into rings at fixed addresses."""

    def __init__(
        self, rings: Rings, obs: Sequence[Leaf], next_obs: Sequence[Leaf], rest: Sequence[Leaf], totals: torch.Tensor,
        faults: tuple[torch.Tensor, torch.Tensor], *, flags: tuple[int, int], next_step: bool,
    ) -> None:  # fmt: skip
        """Bind the memory of the rings.

        Args:
            rings: the state of the rings.
            obs: leaves of the observation.
            next_obs: leaves of stored next observations, or none.
            rest: all other leaves.
            totals: counts of transitions by groups of environments, as in `draw`.
            faults: counters of stacks that cannot be rebuilt, and of unknown environments.
            flags: indices of `terminated` and `truncated` in `rest`.
            next_step: whether the row after an end only resets the environment.
        """
        self._rings = rings
        leaves = [[_use_int64_words(leaf) for leaf in group] for group in (obs, rest, next_obs)]
        obs_words, rest_words, next_words = (tuple(leaf.words for leaf in group) for group in leaves)
        self._is_widened = any(
            words.dtype != leaf.words.dtype
            for words, leaf in zip((*obs_words, *rest_words), (*obs, *rest), strict=True)
        )
        layouts = [[leaf.layout for leaf in group] for group in leaves[:2]]
        has_wide_rows = any(layout[0] * layout[2] > MAX_NARROW for group in layouts for layout in group)
        self._per_program = 1 if has_wide_rows else 8
        obs_layouts, rest_layouts = (_choose_tiles(group, self._per_program) for group in layouts)
        self._launch = BoundKernel(
            write_kernel,
            (obs_words, next_words or obs_words, rest_words, rings.kind, rings.first, rings.head, rings.open,
             rings.resetting, rings.count, totals, *faults, rings.slots, rings.num_envs, rings.size,
             rings.num_sampleable),
            (obs_words, obs_words, rest_words),
            OBS=obs_layouts, REST=rest_layouts, TERMINATED=flags[0], TRUNCATED=flags[1], NEXT_STEP=next_step,
            STORES_NEXT_OBS=bool(next_obs), HAS_HISTORY=rings.slots > rings.num_sampleable,
            GROUP=envs_per_group(rings.num_envs), num_warps=8 if has_wide_rows else 4,
        )  # fmt: skip

    def write(
        self, obs: InputLeaves, next_obs: InputLeaves, rest: InputLeaves, writers: int, steps: int,
        envs: torch.Tensor | None, changes: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:  # fmt: skip
        """Store steps [steps, writers, …] of all environments or of `envs`, in the order of the leaves.

        `changes` are two tensors [GROUPS, steps, writers] to fill: slots, and whether the slot became a transition or
        is no longer one.
        """
        rings = self._rings
        block, programs = split_into_programs(writers, self._per_program)
        if self._is_widened:
            obs, next_obs, rest = (tuple(map(_copy_if_misaligned, inputs)) for inputs in (obs, next_obs, rest))
        changed_slots, is_changed = (rings.head, rings.kind) if changes is None else changes
        self._launch(
            rings.kind, (programs, 1, 1), obs, next_obs, rest, rings.head if envs is None else envs,
            changed_slots, is_changed, writers, steps,
            HAS_ENVS=envs is not None, TRACKS_CHANGES=changes is not None, BLOCK=block,
        )  # fmt: skip


def _copy_if_misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its address is not divisible by eight."""
    return tensor.clone() if tensor.data_ptr() % 8 else tensor
