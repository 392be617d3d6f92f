"""Windows of steps around rows, for sequences: one launch finds flat slots [B, L] and their masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import SIZES, launch, split_into_programs
from relive.kernels.triton.rings import FINAL, TRANSITION, Rings, get_newest_row, get_row, get_slot

MAX_STEPS = 1024
"""Longest window: a program loads all its rows at once."""


@triton.jit
def _find_steps(kind, first, row, env, oldest, newest, slots, num_envs, valid, BACK: tl.constexpr, CROSS: tl.constexpr,
           SPAN: tl.constexpr):  # fmt: skip
    """Return the slots [B, SPAN] of each row and the rows after it, the mask of steps, and the running count of steps.

    With BACK these are the rows before each row, nearest first. Steps stop at the end of an episode; with CROSS they
    continue after its final rows.
    """
    distance = tl.arange(0, SPAN).to(tl.int64)[None, :]
    if BACK:
        row_at = row[:, None] - 1 - distance
        inside = row_at >= oldest[:, None]
    else:
        row_at = row[:, None] + distance
        inside = row_at <= newest[:, None]
    inside = inside & valid[:, None]
    slot = get_slot(tl.maximum(row_at, 0), env[:, None], slots, num_envs)
    row_kind = tl.load(kind + slot, inside, other=0)
    is_step = inside & (row_kind == TRANSITION)
    if not BACK:
        # The row itself, at distance 0, always counts as a step.
        is_step = is_step | (inside & (distance == 0))
    is_stop = ~is_step
    if CROSS:
        is_stop = is_stop & (row_kind != FINAL)
    elif BACK:
        next_slot = get_slot(row_at + 1, env[:, None], slots, num_envs)
        is_stop = is_stop | (tl.load(first + next_slot, inside, other=1) != 0)
    is_before_stop = tl.cumsum(is_stop.to(tl.int32), axis=1) == 0
    is_step = is_step & is_before_stop
    return slot, is_step, tl.cumsum(is_step.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=SIZES)
def windows_kernel(
    flat_slots, windows, mask, train, is_first, ids, kind, first, head, is_open,
    slots: tl.int64, num_envs: tl.int64, rows: tl.int64, before: tl.int32, after: tl.int32,
    CROSS: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the slots of up to `before` preceding steps, the row and the following steps, then -1, and all masks."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = position < rows
    flat = tl.load(flat_slots + position, valid, other=0)
    env = flat % num_envs
    newest = get_newest_row(head, is_open, env, valid)
    row = get_row(flat, newest, slots, num_envs)
    oldest = newest - slots + 1
    length = before + after
    out = position * length
    burn_in = position.to(tl.int32) * 0
    if BACK > 0:
        slot, is_step, step_counts = _find_steps(
            kind, first, row, env, tl.maximum(oldest, 0), newest, slots, num_envs, valid, True, CROSS, BACK
        )
        is_step = is_step & (step_counts <= before)
        burn_in = tl.sum(is_step.to(tl.int32), axis=1)
        target = out[:, None] + burn_in[:, None] - step_counts
        tl.store(windows + target, slot, is_step)
        tl.store(is_first + target, tl.load(first + slot, is_step, other=0), is_step)
    slot, is_step, step_counts = _find_steps(
        kind, first, row, env, oldest, newest, slots, num_envs, valid, False, CROSS, AHEAD
    )
    is_step = is_step & (step_counts <= after)
    num_steps = burn_in + tl.sum(is_step.to(tl.int32), axis=1)
    target = out[:, None] + burn_in[:, None] + step_counts - 1
    tl.store(windows + target, slot, is_step)
    tl.store(is_first + target, tl.load(first + slot, is_step, other=0), is_step)
    step = tl.arange(0, LENGTH)[None, :]
    target = out[:, None] + step
    inside = valid[:, None] & (step < length)
    is_stored = step < num_steps[:, None]
    tl.store(mask + target, is_stored.to(tl.uint8), inside)
    tl.store(train + target, (is_stored & (step >= burn_in[:, None])).to(tl.uint8), inside)
    tl.store(windows + target, tl.full((BLOCK, LENGTH), -1, tl.int64), inside & ~is_stored)
    tl.store(is_first + target, tl.zeros((BLOCK, LENGTH), tl.uint8), inside & ~is_stored)
    tl.store(ids + position, row * num_envs + env, valid)


class Windows(NamedTuple):
    """Windows of steps around rows, with their masks."""

    slots: torch.Tensor
    """Flat slots [B, L], -1 after the last step."""
    mask: torch.Tensor
    """Mask of stored steps, as bytes."""
    train: torch.Tensor
    """Mask of the sampled row and the following steps, as bytes."""
    is_first: torch.Tensor
    """Mask of steps that start an episode, as bytes."""
    ids: torch.Tensor
    """Ids of the sampled rows [B]."""


def find_windows(rings: Rings, flat_slots: torch.Tensor, before: int, after: int, cross: bool, out: Windows) -> None:
    """Find the windows of slots [B], at most `MAX_STEPS` steps each."""
    # When windows cross episodes, up to two rows with final observations lie between two steps, so three
    # rows are loaded per step.
    num_rows_before, num_rows_after = (steps * (3 if cross else 1) for steps in (before, after))
    tiles = {
        "BACK": triton.next_power_of_2(num_rows_before) if before else 0,
        "AHEAD": triton.next_power_of_2(num_rows_after) if after else 0,
        "LENGTH": triton.next_power_of_2(before + after),
    }
    rows, widest = len(flat_slots), max(tiles.values())
    block, programs = split_into_programs(rows, max(512 // widest, 1))
    launch(
        windows_kernel, flat_slots, programs, flat_slots, out.slots, out.mask, out.train, out.is_first, out.ids,
        rings.kind, rings.first, rings.head, rings.open, rings.slots, rings.num_envs, rows, before, after,
        CROSS=cross, BLOCK=block, **tiles, num_warps=4 if widest <= 512 else 16,
    )  # fmt: skip
