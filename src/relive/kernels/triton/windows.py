"""Windows of steps around rows, for sequences: flat slots [B, L] and their masks, in one launch."""

# Jitted functions are Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import SIZES, Variant, launch
from relive.kernels.triton.rings import FINAL, TRANSITION, Rings
from relive.kernels.triton.words import blocks

MAX_STEPS = 1024
"""Longest window: a program loads all its rows at once."""


@triton.jit
def _steps(kind, first, row, env, oldest, newest, slots, num_envs, valid, BACK: tl.constexpr, CROSS: tl.constexpr,
           SPAN: tl.constexpr):  # fmt: skip
    """The rows after (with BACK: before) each row [B, SPAN]: their slots, mask of steps, and running number of steps.

    Steps stop at the end of an episode; with CROSS they continue after its final rows.
    """
    away = tl.arange(0, SPAN).to(tl.int64)[None, :]
    if BACK:
        at = row[:, None] - 1 - away
        inside = at >= oldest[:, None]
    else:
        at = row[:, None] + away
        inside = at <= newest[:, None]
    inside = inside & valid[:, None]
    slot = tl.maximum(at, 0) % slots * num_envs + env[:, None]
    row_kind = tl.load(kind + slot, inside, other=0)
    is_step = inside & (row_kind == TRANSITION)
    if not BACK:
        is_step = is_step | (inside & (away == 0))  # the row itself is always a step
    stops = ~is_step
    if CROSS:
        stops = stops & (row_kind != FINAL)
    elif BACK:
        after = (at + 1) % slots * num_envs + env[:, None]
        stops = stops | (tl.load(first + after, inside, other=1) != 0)
    reached = tl.cumsum(stops.to(tl.int32), axis=1) == 0
    is_step = is_step & reached
    return slot, is_step, tl.cumsum(is_step.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=SIZES)
def windows_kernel(
    drawn, windows, mask, train, is_first, ids, kind, first, head, is_open,
    slots: tl.int64, num_envs: tl.int64, rows: tl.int64, before: tl.int32, after: tl.int32,
    CROSS: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write up to `before` preceding steps, the row, the following steps, then -1."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < rows
    flat = tl.load(drawn + place, valid, other=0)
    env = flat % num_envs
    newest = tl.load(head + env, valid, other=0) - 1 + tl.load(is_open + env, valid, other=0).to(tl.int64)
    age = (newest - flat // num_envs) % slots
    row = newest - tl.where(age < 0, age + slots, age)
    oldest = newest - slots + 1
    length = before + after
    out = place * length
    burn_in = place.to(tl.int32) * 0
    if BACK > 0:
        slot, is_step, nth = _steps(
            kind, first, row, env, tl.maximum(oldest, 0), newest, slots, num_envs, valid, True, CROSS, BACK
        )
        is_step = is_step & (nth <= before)
        burn_in = tl.sum(is_step.to(tl.int32), axis=1)
        to = out[:, None] + burn_in[:, None] - nth
        tl.store(windows + to, slot, is_step)
        tl.store(is_first + to, tl.load(first + slot, is_step, other=0), is_step)
    slot, is_step, nth = _steps(kind, first, row, env, oldest, newest, slots, num_envs, valid, False, CROSS, AHEAD)
    is_step = is_step & (nth <= after)
    num_steps = burn_in + tl.sum(is_step.to(tl.int32), axis=1)
    to = out[:, None] + burn_in[:, None] + nth - 1
    tl.store(windows + to, slot, is_step)
    tl.store(is_first + to, tl.load(first + slot, is_step, other=0), is_step)
    step = tl.arange(0, LENGTH)[None, :]
    to = out[:, None] + step
    inside = valid[:, None] & (step < length)
    real = step < num_steps[:, None]
    tl.store(mask + to, real.to(tl.uint8), inside)
    tl.store(train + to, (real & (step >= burn_in[:, None])).to(tl.uint8), inside)
    tl.store(windows + to, tl.full((BLOCK, LENGTH), -1, tl.int64), inside & ~real)
    tl.store(is_first + to, tl.zeros((BLOCK, LENGTH), tl.uint8), inside & ~real)
    tl.store(ids + place, row * num_envs + env, valid)


class Windows(NamedTuple):
    """Windows of steps around rows, with their masks."""

    slots: torch.Tensor
    """Flat slots [B, L], -1 after the last step."""
    mask: torch.Tensor
    """Mask of real steps, as bytes."""
    train: torch.Tensor
    """Mask of the sampled row and the following steps, as bytes."""
    is_first: torch.Tensor
    """Mask of steps that start an episode, as bytes."""
    ids: torch.Tensor
    """Ids of the sampled rows [B]."""


def _tiles(before: int, after: int, cross: bool) -> dict[str, int]:
    """Numbers of rows to load before and after each row: at most two final rows separate two steps."""
    back, ahead = (triton.next_power_of_2(steps * (3 if cross else 1)) if steps else 0 for steps in (before, after))
    return {"BACK": back, "AHEAD": ahead, "LENGTH": triton.next_power_of_2(before + after)}


def _rows(tiles: dict[str, int]) -> int:
    """Windows per program."""
    return max(512 // max(tiles.values()), 1)


def _options(tiles: dict[str, int]) -> dict[str, Any]:
    return {"num_warps": 4 if max(tiles.values()) <= 512 else 16, "enable_fp_fusion": False}


def find_windows(rings: Rings, drawn: torch.Tensor, before: int, after: int, cross: bool, out: Windows) -> None:
    """Find the windows of slots [B], at most `MAX_STEPS` steps each."""
    rows, tiles = len(drawn), _tiles(before, after, cross)
    block, programs = blocks(rows, _rows(tiles))
    launch(windows_kernel, drawn, programs)(
        drawn, out.slots, out.mask, out.train, out.is_first, out.ids, rings.kind, rings.first, rings.head, rings.open,
        rings.slots, rings.num_envs, rows, before, after, CROSS=cross, BLOCK=block, **tiles, **_options(tiles),
    )  # fmt: skip


_TYPES = {"drawn": "*i64", "windows": "*i64", "mask": "*u8", "train": "*u8", "is_first": "*u8", "ids": "*i64"}
_TYPES |= {"kind": "*u8", "first": "*u8", "head": "*i64", "is_open": "*u8"}


def _variant(name: str, before: int, after: int, cross: bool = False) -> Variant:
    types = _TYPES | dict.fromkeys(("slots", "num_envs", "rows"), "i64") | {"before": "i32", "after": "i32"}
    tiles = _tiles(before, after, cross)
    return Variant(
        windows_kernel, name, types, {**tiles, "CROSS": cross, "BLOCK": _rows(tiles)}, _options(tiles), tuple(_TYPES)
    )


VARIANTS = (
    _variant("16 steps", 0, 16),
    _variant("16 steps, 8 of burn-in", 8, 16),
    _variant("16 steps, 8 of burn-in, crossing", 8, 16, cross=True),
    _variant("1,024 steps, crossing", 0, 1024, cross=True),
)
