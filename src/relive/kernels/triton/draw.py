"""Drawing transitions uniformly in one launch, without a look at every slot.

A row first draws its environment in proportion to how many transitions that has: by the sums of blocks of environments,
then by the counts in one block. Then it draws rows of that environment until one is a transition. At least about one
row in three is (between two transitions lie at most a reset and a cut), so few turns are needed however rows lie, and
every transition is exactly as likely as any other.
"""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import launch
from relive.kernels.triton.philox import count_call, random_pair
from relive.kernels.triton.slots import TRANSITION, slot_of
from relive.kernels.triton.variants import Variant
from relive.kernels.triton.words import INTERPRETED, Rings, blocks

MOST_TURNS = tl.constexpr(4096)
"""A ring whose counts are wrong must not hold up the device for ever."""


@triton.jit
def _environment(count, num_envs, bits, GROUP: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr):
    """An environment for each of the random numbers [B], in proportion to its count."""
    group = tl.arange(0, GROUPS)
    sums = group.to(tl.int64) * 0
    for start in range(0, GROUP, MEMBERS):
        env = group[:, None] * GROUP + start + tl.arange(0, MEMBERS)[None, :]
        sums += tl.sum(tl.load(count + env, env < num_envs, other=0), axis=1)
    member = tl.arange(0, GROUP)
    total = tl.maximum(tl.sum(sums, axis=0), 1)
    point = bits % total
    ends = tl.cumsum(sums, axis=0)
    chosen = tl.sum((ends[None, :] <= point[:, None]).to(tl.int32), axis=1)
    chosen = tl.minimum(chosen, GROUPS - 1)
    point -= tl.max(tl.where(ends[None, :] <= point[:, None], ends[None, :], 0), axis=1)
    env = chosen[:, None] * GROUP + member[None, :]
    ends = tl.cumsum(tl.load(count + env, env < num_envs, other=0), axis=1)
    chosen = chosen * GROUP + tl.sum((ends <= point[:, None]).to(tl.int32), axis=1)
    return tl.minimum(chosen, num_envs - 1).to(tl.int64)


@triton.jit
def draw_rows_kernel(
    stream, kind, head, is_open, floor, count, out, slots, num_envs, alive, rows,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Flat slots of transitions, uniformly and with replacement [rows]."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < rows
    key, call = tl.load(stream), tl.load(stream + 1)
    bits, candidate = random_pair(key, call, place, place * 0)
    env = _environment(count, num_envs, bits, GROUP, GROUPS, MEMBERS)
    newest = tl.load(head + env, valid, other=0) - 1 + tl.load(is_open + env, valid, other=0).to(tl.int64)
    oldest = tl.maximum(tl.load(floor + env, valid, other=0), newest - alive + 1)
    window = tl.maximum(newest - oldest + 1, 1)
    oldest = tl.maximum(oldest, 0)
    slot = slot_of(oldest + candidate % window, env, slots, num_envs)
    drawable = valid & (tl.load(count + env, valid, other=0) > 0)
    missing = drawable & (tl.load(kind + slot, valid, other=0) != TRANSITION)
    turn = 1
    while (tl.max(missing.to(tl.int32), axis=0) > 0) & (turn < MOST_TURNS):
        bits, candidate = random_pair(key, call, place, place * 0 + turn)
        tried = slot_of(oldest + bits % window, env, slots, num_envs)
        slot = tl.where(missing, tried, slot)
        missing = missing & (tl.load(kind + slot, valid, other=0) != TRANSITION)
        tried = slot_of(oldest + candidate % window, env, slots, num_envs)
        slot = tl.where(missing, tried, slot)
        missing = missing & (tl.load(kind + slot, valid, other=0) != TRANSITION)
        turn += 1
    tl.store(out + place, slot, valid)
    count_call(stream, call)


def _groups(num_envs: int) -> dict[str, int]:
    """How environments are grouped: about as many groups as each has members, summed a few members at a time."""
    group = triton.next_power_of_2(math.isqrt(max(num_envs - 1, 0)) + 1)
    groups = triton.next_power_of_2(triton.cdiv(num_envs, group))
    return {"GROUP": group, "GROUPS": groups, "MEMBERS": group if INTERPRETED else min(max(1024 // groups, 1), group)}


def _rows(num_envs: int) -> int:
    """How many rows a program draws: each looks at a group of counts."""
    return min(max(1024 // _groups(num_envs)["GROUP"], 1), 64)


def draw_slots(rings: Rings, stream: torch.Tensor, rows: int) -> torch.Tensor:
    """Flat slots of transitions, uniformly and with replacement [rows]; some slot where there is no transition."""
    out = torch.empty(rows, dtype=torch.int64, device=stream.device)
    block, programs = blocks(rows, _rows(rings.num_envs))
    launch(draw_rows_kernel, stream, programs)(
        stream, rings.kind, rings.head, rings.open, rings.floor, rings.count, out, rings.slots, rings.num_envs,
        rings.alive, rows, **_groups(rings.num_envs), BLOCK=block, enable_fp_fusion=False,
    )  # fmt: skip
    return out


_TYPES = {"stream": "*i64", "kind": "*u8", "head": "*i64", "is_open": "*u8", "floor": "*i64", "count": "*i64"}
_TYPES |= {"out": "*i64"}


def _variant(name: str, sizes: str, num_envs: int) -> Variant:
    types = _TYPES | dict.fromkeys(("slots", "num_envs", "alive", "rows"), sizes)
    constants = {**_groups(num_envs), "BLOCK": _rows(num_envs)}
    return Variant(draw_rows_kernel, name, types, constants, {"enable_fp_fusion": False}, tuple(_TYPES))


VARIANTS = (
    _variant("4,096 environments", "i32", 4096),
    _variant("65,536 environments, int64", "i64", 65_536),
    _variant("1 environment", "i32", 1),
)
