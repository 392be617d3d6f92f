"""Uniform sampling of transitions in one launch, without scanning all slots or environments.

Each draw first selects an environment in proportion to its number of transitions: by totals of groups of environments,
which writes maintain, then by the counts within a group. Then it tries random rows of that environment until one is a
transition. At least about one row in three is (at most a reset and a cut separate two transitions), so few turns are
needed, and all transitions are equally likely.
"""

# Jitted functions are Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import SIZES, Launch, Variant
from relive.kernels.triton.rings import TRANSITION, Rings, slot_of
from relive.kernels.triton.stream import CELL, MAX_DRAWS, count_calls, draw_blocks, load_calls, random_pair

BLOCK = CELL.value
"""Draws per program on a GPU. Each draw reads a group of counts."""
MAX_TURNS = tl.constexpr(4096)
"""Limit that keeps corrupt counts from blocking the device."""


@triton.jit
def _environment(count, totals, num_envs, bits, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Select an environment for each random number [B], in proportion to its count."""
    group = tl.arange(0, GROUPS)
    ends = tl.cumsum(tl.load(totals + group), axis=0)
    point = bits % tl.maximum(tl.max(ends, axis=0), 1)
    passed = ends[None, :] <= point[:, None]
    chosen = tl.minimum(tl.sum(passed.to(tl.int32), axis=1), GROUPS - 1)
    point -= tl.max(tl.where(passed, ends[None, :], 0), axis=1)
    env = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    ends = tl.cumsum(tl.load(count + env, env < num_envs, other=0), axis=1)
    chosen = chosen * GROUP + tl.sum((ends <= point[:, None]).to(tl.int32), axis=1)
    return tl.minimum(chosen, num_envs - 1).to(tl.int64)


@triton.jit(do_not_specialize=SIZES)
def draw_rows_kernel(
    out, rows: tl.int64, stream, kind, head, is_open, floor, count, totals,
    slots: tl.int64, num_envs: tl.int64, alive: tl.int64,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw flat slots of transitions [rows], uniformly with replacement."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < rows
    key, call = tl.load(stream), load_calls(stream, place, valid)
    bits, candidate = random_pair(key, call, place, 0)
    env = _environment(count, totals, num_envs, bits, GROUP, GROUPS)
    newest = tl.load(head + env, valid, other=0) - 1 + tl.load(is_open + env, valid, other=0).to(tl.int64)
    oldest = tl.maximum(tl.load(floor + env, valid, other=0), newest - alive + 1)
    window = tl.maximum(newest - oldest + 1, 1)
    oldest = tl.maximum(oldest, 0)
    slot = slot_of(oldest + candidate % window, env, slots, num_envs)
    drawable = valid & (tl.load(count + env, valid, other=0) > 0)
    missing = drawable & (tl.load(kind + slot, valid, other=0) != TRANSITION)
    turn = 1
    while (tl.max(missing.to(tl.int32), axis=0) > 0) & (turn < MAX_TURNS):
        bits, candidate = random_pair(key, call, place, turn)
        tried = slot_of(oldest + bits % window, env, slots, num_envs)
        slot = tl.where(missing, tried, slot)
        missing = missing & (tl.load(kind + slot, valid, other=0) != TRANSITION)
        tried = slot_of(oldest + candidate % window, env, slots, num_envs)
        slot = tl.where(missing, tried, slot)
        missing = missing & (tl.load(kind + slot, valid, other=0) != TRANSITION)
        turn += 1
    tl.store(out + place, slot, valid)
    count_calls(stream, place, call, valid)


def group_size(num_envs: int) -> int:
    """Number of environments per group, about equal to the number of groups."""
    return triton.next_power_of_2(math.isqrt(max(num_envs - 1, 0)) + 1)


def group_totals(count: torch.Tensor) -> torch.Tensor:
    """Sum the counts of all environments by groups."""
    size = group_size(len(count))
    groups = triton.next_power_of_2(triton.cdiv(len(count), size))
    return torch.nn.functional.pad(count, (0, groups * size - len(count))).view(groups, size).sum(1)


def _options(num_envs: int) -> dict[str, Any]:
    return {"num_warps": 4 if num_envs <= 4096 else 16, "enable_fp_fusion": False}


class RowDrawer:
    """Draws slots of transitions from rings, by the totals of their counts."""

    def __init__(self, rings: Rings, totals: torch.Tensor) -> None:
        self._rings, self._totals = rings, totals
        self._constants = {"GROUP": group_size(rings.num_envs), "GROUPS": len(totals), **_options(rings.num_envs)}
        self._launches: dict[tuple[int, int], Launch] = {}

    def draw(self, stream: torch.Tensor, rows: int) -> torch.Tensor:
        """Draw flat slots of transitions [rows], uniformly with replacement; arbitrary slots of an empty ring."""
        out = torch.empty(rows, dtype=torch.int64, device=stream.device)
        for start in range(0, rows, MAX_DRAWS):
            part = out if rows <= MAX_DRAWS else out[start : start + MAX_DRAWS]
            count = min(rows - start, MAX_DRAWS)
            block, programs = draw_blocks(count, BLOCK)
            key = block, stream.data_ptr()
            launch = self._launches.get(key) or self._bind(key, stream)
            launch(stream, (programs, 1, 1), part, count)
        return out

    def _bind(self, key: tuple[int, int], stream: torch.Tensor) -> Launch:
        rings = self._rings
        own = stream, rings.kind, rings.head, rings.open, rings.floor, rings.count, self._totals
        sizes = rings.slots, rings.num_envs, rings.alive
        self._launches[key] = launch = Launch(draw_rows_kernel, (*own, *sizes), {**self._constants, "BLOCK": key[0]})
        return launch


_TYPES = {"out": "*i64", "stream": "*i64", "kind": "*u8", "head": "*i64", "is_open": "*u8", "floor": "*i64"}
_TYPES |= {"count": "*i64", "totals": "*i64"}


def _variant(name: str, num_envs: int) -> Variant:
    types = _TYPES | dict.fromkeys(("rows", "slots", "num_envs", "alive"), "i64")
    group = group_size(num_envs)
    constants = {"GROUP": group, "GROUPS": triton.next_power_of_2(triton.cdiv(num_envs, group)), "BLOCK": BLOCK}
    return Variant(draw_rows_kernel, name, types, constants, _options(num_envs), tuple(_TYPES))


VARIANTS = (_variant("4,096 environments", 4096), _variant("65,536 environments", 65_536), _variant("1 environment", 1))
