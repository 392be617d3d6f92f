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

from relive.kernels.triton.philox import count_call, random_pair
from relive.kernels.triton.slots import TRANSITION, slot_of
from relive.kernels.triton.variants import Variant
from relive.kernels.triton.words import Rings, blocks

MOST_TURNS = tl.constexpr(4096)
"""A ring whose counts are wrong must not hold up the device for ever."""


@triton.jit
def _environment(count, num_envs, bits, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """An environment for each of the random numbers [B], in proportion to its count."""
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, GROUP)
    env = group[:, None] * GROUP + member[None, :]
    sums = tl.sum(tl.load(count + env, env < num_envs, other=0), axis=1)
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
def draw_kernel(
    stream, kind, head, is_open, floor, count, out, slots, num_envs, alive, rows,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Flat slots of transitions, uniformly and with replacement [rows]."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < rows
    key, call = tl.load(stream), tl.load(stream + 1)
    bits, candidate = random_pair(key, call, place, place * 0)
    env = _environment(count, num_envs, bits, GROUP, GROUPS)
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


def draw_slots(rings: Rings, stream: torch.Tensor, rows: int) -> torch.Tensor:
    """Flat slots of transitions, uniformly and with replacement [rows]; some slot where there is no transition."""
    out = torch.empty(rows, dtype=torch.int64, device=stream.device)
    group = triton.next_power_of_2(math.isqrt(max(rings.num_envs - 1, 0)) + 1)
    block, programs = blocks(rows, max(4096 // group, 1) if group > 64 else 64)
    draw_kernel[(programs,)](
        stream, rings.kind, rings.head, rings.open, rings.floor, rings.count, out, rings.slots, rings.num_envs,
        rings.alive, rows, GROUP=group, GROUPS=triton.next_power_of_2(triton.cdiv(rings.num_envs, group)), BLOCK=block,
    )  # fmt: skip
    return out


_TYPES = {"stream": "*i64", "kind": "*u8", "head": "*i64", "is_open": "*u8", "floor": "*i64", "count": "*i64"}
_TYPES |= {"out": "*i64"}


def _variant(name: str, sizes: str, **constants: int) -> Variant:
    types = _TYPES | dict.fromkeys(("slots", "num_envs", "alive", "rows"), sizes)
    return Variant(draw_kernel, name, types, constants, aligned=tuple(_TYPES))


VARIANTS = (
    _variant("4,096 environments", "i32", GROUP=64, GROUPS=64, BLOCK=64),
    _variant("65,536 environments, int64", "i64", GROUP=256, GROUPS=256, BLOCK=16),
    _variant("1 environment", "i32", GROUP=1, GROUPS=1, BLOCK=64),
)
