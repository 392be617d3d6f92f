"""Uniform sampling of transitions in one launch, without scanning all slots or environments.

Each draw takes three steps, after which all transitions are equally likely:

1. Select a group of environments in proportion to its total, which writes maintain.
2. Select an environment of the group in proportion to its number of transitions.
3. Try random rows of this environment until one is a transition. Few attempts are needed: between two transitions lie
   at most a dummy step and the final row of a cut, so about one row in three is a transition, or more.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import SIZES, BoundKernel
from relive.kernels.triton.rings import TRANSITION, Rings, get_newest_row, get_slot
from relive.kernels.triton.stream import (
    CELL,
    MAX_DRAWS,
    draw_random_pair,
    increment_draw_counts,
    load_draw_counts,
    split_draws_into_programs,
)

BLOCK = CELL.value
"""Number of draws per program on a GPU. Each draw reads the counts of one group of environments."""
MAX_ATTEMPTS = tl.constexpr(4096)
"""Maximum number of attempts per draw, so that corrupt counts do not block the device."""


@triton.jit
def _choose_env(count, totals, num_envs, bits, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Select an environment for each random number [B], in proportion to its number of transitions."""
    group = tl.arange(0, GROUPS)
    ends = tl.cumsum(tl.load(totals + group), axis=0)
    point = bits % tl.maximum(tl.max(ends, axis=0), 1)
    is_before = ends[None, :] <= point[:, None]
    index = tl.minimum(tl.sum(is_before.to(tl.int32), axis=1), GROUPS - 1)
    point -= tl.max(tl.where(is_before, ends[None, :], 0), axis=1)
    env = index[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    ends = tl.cumsum(tl.load(count + env, env < num_envs, other=0), axis=1)
    index = index * GROUP + tl.sum((ends <= point[:, None]).to(tl.int32), axis=1)
    return tl.minimum(index, num_envs - 1).to(tl.int64)


@triton.jit(do_not_specialize=SIZES)
def draw_rows_kernel(
    out, rows: tl.int64, stream, kind, head, is_open, floor, count, totals,
    slots: tl.int64, num_envs: tl.int64, num_sampleable: tl.int64,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw flat slots of transitions [rows], uniformly with replacement."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = position < rows
    key, call = tl.load(stream), load_draw_counts(stream, position, valid)
    bits, candidate = draw_random_pair(key, call, position, 0)
    env = _choose_env(count, totals, num_envs, bits, GROUP, GROUPS)
    newest = get_newest_row(head, is_open, env, valid)
    oldest = tl.maximum(tl.load(floor + env, valid, other=0), newest - num_sampleable + 1)
    window = tl.maximum(newest - oldest + 1, 1)
    oldest = tl.maximum(oldest, 0)
    slot = get_slot(oldest + candidate % window, env, slots, num_envs)
    has_rows = valid & (tl.load(count + env, valid, other=0) > 0)
    is_missing = has_rows & (tl.load(kind + slot, valid, other=0) != TRANSITION)
    attempt = 1
    while (tl.max(is_missing.to(tl.int32), axis=0) > 0) & (attempt < MAX_ATTEMPTS):
        bits, candidate = draw_random_pair(key, call, position, attempt)
        tried_slot = get_slot(oldest + bits % window, env, slots, num_envs)
        slot = tl.where(is_missing, tried_slot, slot)
        is_missing = is_missing & (tl.load(kind + slot, valid, other=0) != TRANSITION)
        tried_slot = get_slot(oldest + candidate % window, env, slots, num_envs)
        slot = tl.where(is_missing, tried_slot, slot)
        is_missing = is_missing & (tl.load(kind + slot, valid, other=0) != TRANSITION)
        attempt += 1
    tl.store(out + position, slot, valid)
    increment_draw_counts(stream, position, call, valid)


def envs_per_group(num_envs: int) -> int:
    """Return the number of environments per group, about equal to the number of groups."""
    return triton.next_power_of_2(math.isqrt(max(num_envs - 1, 0)) + 1)


def sum_counts_by_group(count: torch.Tensor) -> torch.Tensor:
    """Sum the counts of all environments by groups."""
    size = envs_per_group(len(count))
    groups = triton.next_power_of_2(triton.cdiv(len(count), size))
    return torch.nn.functional.pad(count, (0, groups * size - len(count))).view(groups, size).sum(1)


class RowDrawer:
    """Draws slots of transitions from rings. `totals` are the counts of transitions by groups of environments."""

    def __init__(self, rings: Rings, totals: torch.Tensor) -> None:
        state = rings.kind, rings.head, rings.open, rings.floor, rings.count, totals
        self._launch = BoundKernel(
            draw_rows_kernel, (*state, rings.slots, rings.num_envs, rings.num_sampleable),
            GROUP=envs_per_group(rings.num_envs), GROUPS=len(totals), num_warps=4 if rings.num_envs <= 4096 else 16,
        )  # fmt: skip

    def draw(self, stream: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Draw flat slots of transitions [num_rows], uniformly with replacement; arbitrary ones of an empty ring."""
        out = torch.empty(num_rows, dtype=torch.int64, device=stream.device)
        for start in range(0, num_rows, MAX_DRAWS):
            part = out if num_rows <= MAX_DRAWS else out[start : start + MAX_DRAWS]
            count = min(num_rows - start, MAX_DRAWS)
            block, programs = split_draws_into_programs(count, BLOCK)
            self._launch(stream, (programs, 1, 1), part, count, stream, BLOCK=block)
        return out
