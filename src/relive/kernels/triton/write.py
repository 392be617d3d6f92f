"""Writing of steps into the rings of environments: one launch per step or block of steps.

Each program owns a few environments: no two programs write the same row, and a block of steps is a loop. In each step a
program first reads the state (heads, kinds, pending observations), then passes a barrier, then writes: all warps read
the same state.

The form of a leaf is described at `words.Form`.
"""

# Jitted functions are Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from relive.kernels.triton import words
from relive.kernels.triton.draw import group_size
from relive.kernels.triton.launching import SIZES, Launch, Variant
from relive.kernels.triton.rings import FINAL, HISTORY, PENDING, TRANSITION, Rings, earlier, later, slot_of
from relive.kernels.triton.words import INTERPRETED, Form, Leaf, as_words, blocks

GROUPS = tl.constexpr(3)
"""Number of slots that a step of an environment may change."""
NARROW = 256
"""Largest number of words per row for which a program takes several environments."""


@triton.jit
def given_words(base, item, column, frame, where, FORM: tl.constexpr):
    """Load the words [E, C] of one frame of the caller's items [E]."""
    word = column
    if FORM[2] > 1:
        word = column // FORM[3] * (FORM[2] * FORM[3]) + frame * FORM[3] + column % FORM[3]
    inside = where[:, None] & (column < FORM[0])[None, :]
    return tl.load(base + item[:, None] * (FORM[0] * FORM[2]) + word[None, :], inside, other=0)


@triton.jit
def _no_tile(item, FORM: tl.constexpr):
    """Zeros, int32 [E, C]; tl.zeros of Triton 3.4 does not accept elements of a constexpr tuple."""
    return (item[:, None] * 0 + tl.arange(0, FORM[1])[None, :] * 0).to(tl.int32)


@triton.jit
def _differs(stored, given, first, pending, item, valid, num_envs, size, FORM: tl.constexpr):
    """Whether the passed observations differ in any bit from those of the pending rows: int32 [E]."""
    differs = _no_tile(pending, FORM)
    for start in range(0, FORM[0], FORM[1]):
        column = start + tl.arange(0, FORM[1])
        inside = valid[:, None] & (column < FORM[0])[None, :]
        at = pending
        started = pending < 0
        for back in range(FORM[2]):
            stored_words = tl.load(stored + at[:, None] * FORM[0] + column[None, :], inside, other=0)
            if FORM[4]:
                stored_words = tl.where(started[:, None], 0, stored_words)
            differs |= (stored_words != given_words(given, item, column, FORM[2] - 1 - back, valid, FORM)).to(tl.int32)
            if FORM[2] > 1:
                started |= tl.load(first + at, valid, other=0) != 0
                at = tl.where(started, at, earlier(at, 1, num_envs, size))
    return tl.max(differs, axis=1)


@triton.jit
def _misstacked(given, following, item, valid, same, resets, FORM: tl.constexpr):
    """Number of steps whose stacks cannot be rebuilt from single frames."""
    unpadded = _no_tile(item, FORM)
    unfollowed = unpadded
    for start in range(0, FORM[0], FORM[1]):
        column = start + tl.arange(0, FORM[1])
        newest = given_words(given, item, column, FORM[2] - 1, valid, FORM)
        younger = newest
        padding = newest
        if FORM[4]:
            padding = newest * 0
        for back in range(1, FORM[2]):
            words = given_words(given, item, column, FORM[2] - 1 - back, valid, FORM)
            unpadded |= (words != padding).to(tl.int32)
            follows = given_words(following, item, column, FORM[2] - 1 - back, valid, FORM)
            unfollowed |= (follows != younger).to(tl.int32)
            younger = words
    bad = valid & ~resets & ((~same & (tl.max(unpadded, axis=1) > 0)) | (tl.max(unfollowed, axis=1) > 0))
    return tl.sum(bad.to(tl.int64), axis=0)


@triton.jit
def _store(stored, slot, given, item, where, FORM: tl.constexpr):
    """Copy items to slots; the newest frame of a stack."""
    for start in range(0, FORM[0], FORM[1]):
        column = start + tl.arange(0, FORM[1])
        words = given_words(given, item, column, FORM[2] - 1, where, FORM)
        tl.store(
            stored + slot[:, None] * FORM[0] + column[None, :], words, where[:, None] & (column < FORM[0])[None, :]
        )


@triton.jit
def _leaves_window(kind, row, slot, where, slots, num_envs, size, alive):
    """Slots that leave the sampling window when the rows at `slot` become the newest; mask of transitions."""
    leaving = later(slot, slots - alive, num_envs, size)
    row_kind = tl.load(kind + leaving, where, other=0)
    return leaving, where & (row >= alive) & (row_kind == TRANSITION)


@triton.jit
def _store_leaves(leaves, slot, given, item, where, FORMS: tl.constexpr):
    """Call `_store` for every leaf."""
    for i in tl.static_range(len(FORMS)):
        _store(leaves[i], slot, given[i], item, where, tl.constexpr(FORMS[i]))


@triton.jit
def _continues(
    obs, given, following, first, pending, item, valid, opened, resets, broken, num_envs, size, OBS: tl.constexpr
):
    """Mask of steps that start with the pending observation. Counts stacks that cannot be rebuilt."""
    differs = valid.to(tl.int32) * 0
    for i in tl.static_range(len(OBS)):
        differs |= _differs(obs[i], given[i], first, pending, item, valid, num_envs, size, tl.constexpr(OBS[i]))
    same = opened & (differs == 0)
    for i in tl.static_range(len(OBS)):
        if OBS[i][2] > 1:
            tl.atomic_add(broken, _misstacked(given[i], following[i], item, valid, same, resets, tl.constexpr(OBS[i])))
    return same


@triton.jit
def _ended(terminated, truncated, item, valid):
    return (tl.load(terminated + item, valid, other=0) | tl.load(truncated + item, valid, other=0)) != 0


@triton.jit
def _byte(like, number):
    return (like * 0 + number).to(tl.uint8)


@triton.jit
def _store_touched(
    touched, changed, item, steps, writers, inside, leaving, dies, slot, is_new, next_leaving, next_dies
):
    """Record the slots that became transitions or ceased to be."""
    for i in tl.static_range(GROUPS):
        at = item + (item * 0 + i) * steps * writers
        slots = leaving if i == 0 else slot if i == 1 else next_leaving
        which = dies if i == 0 else is_new if i == 1 else next_dies
        tl.store(touched + at, slots, inside)
        tl.store(changed + at, which.to(tl.uint8), inside)


@triton.jit
def _store_state(head, is_open, count, totals, env, row, opened, before, stored, valid, GROUP: tl.constexpr):
    """Store the state of the rings, and update the totals of groups."""
    tl.store(head + env, row, valid)
    tl.store(is_open + env, opened.to(tl.uint8), valid)
    tl.store(count + env, stored, valid)
    tl.atomic_add(totals + env // GROUP, stored - before, valid & (stored != before))


@triton.jit
def _load_envs(envs, place, valid, num_envs, unknown_envs):
    """Load environment indices and the mask of valid ones. Counts the invalid ones."""
    env = tl.load(envs + place, valid, other=0)
    unknown = valid & ((env < 0) | (env >= num_envs))
    num_unknown = tl.sum(unknown.to(tl.int64), axis=0)
    if num_unknown > 0:
        tl.atomic_add(unknown_envs, num_unknown)
    return tl.where(unknown, 0, env), valid & ~unknown


@triton.jit(do_not_specialize=SIZES)
def write_kernel(
    obs_given, next_given, others_given, envs, touched, changed, writers: tl.int32, steps: tl.int32,
    obs, next_stored, others, kind, first, head, is_open, resetting, count, totals, broken, unknown_envs,
    slots: tl.int64, num_envs: tl.int64, size: tl.int64, alive: tl.int64,
    OBS: tl.constexpr, OTHERS: tl.constexpr, TERMINATED: tl.constexpr, TRUNCATED: tl.constexpr,
    NEXT_STEP: tl.constexpr, KEEPS_NEXT: tl.constexpr, HAS_ENVS: tl.constexpr, KEEPS_TOUCHED: tl.constexpr,
    HAS_HISTORY: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store steps [steps, writers] of all environments or of `envs`; invalid environments are skipped."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < writers
    env = place
    if HAS_ENVS:
        env, valid = _load_envs(envs, place, valid, num_envs, unknown_envs)
    row = tl.load(head + env, valid, other=0)
    opened = tl.load(is_open + env, valid, other=0) != 0
    resets = (tl.load(resetting + env, valid, other=0) != 0) if NEXT_STEP else place < 0
    before = tl.load(count + env, valid, other=0)
    stored = before
    for t in range(steps):
        item = (tl.full((), 0, tl.int64) + t) * writers + place
        pending = slot_of(row, env, slots, num_envs)
        same = _continues(
            obs, obs_given, next_given, first, pending, item, valid, opened, resets, broken, num_envs, size, OBS
        )
        cut = valid & opened & ~resets & ~same
        fresh = valid & (~opened | cut)
        row += cut.to(tl.int64)
        slot = tl.where(cut, later(pending, 1, num_envs, size), pending)
        next_slot = later(slot, 1, num_envs, size)
        leaving, dies = _leaves_window(kind, row, slot, fresh, slots, num_envs, size, alive)
        # With stored next observations there is no following row to make room for.
        moves = valid & (place < 0) if KEEPS_NEXT else valid
        next_leaving, next_dies = _leaves_window(kind, row + 1, next_slot, moves, slots, num_envs, size, alive)
        ends = _ended(others_given[TERMINATED], others_given[TRUNCATED], item, valid) & ~resets
        closes = place < 0 if NEXT_STEP or KEEPS_NEXT else ends
        tl.debug_barrier()
        if HAS_HISTORY:
            tl.store(kind + leaving, _byte(env, HISTORY), dies)
            tl.store(kind + next_leaving, _byte(env, HISTORY), next_dies)
            tl.debug_barrier()  # with one row of history, `leaving` and `next_slot` are the same slot
        tl.store(kind + pending, _byte(env, FINAL), cut)
        tl.store(kind + slot, tl.where(resets, FINAL, TRANSITION).to(tl.uint8), valid)
        tl.store(first + slot, _byte(env, 1), fresh)
        _store_leaves(obs, slot, obs_given, item, fresh, OBS)
        _store_leaves(others, slot, others_given, item, valid, OTHERS)
        if not KEEPS_NEXT:
            tl.store(first + next_slot, resets.to(tl.uint8), valid)
            tl.store(kind + next_slot, tl.where(closes, FINAL, PENDING).to(tl.uint8), valid)
            opened = ~closes
            _store_leaves(obs, next_slot, next_given, item, valid, OBS)
        else:
            _store_leaves(next_stored, slot, next_given, item, valid, OBS)
        if KEEPS_TOUCHED:
            _store_touched(
                touched, changed, item, steps, writers, place < writers,
                leaving, dies, slot, valid & ~resets, next_leaving, next_dies,
            )  # fmt: skip
        stored += (~resets).to(tl.int64) - dies.to(tl.int64) - next_dies.to(tl.int64)
        row += 1 + closes.to(tl.int64)
        resets = ends if NEXT_STEP else resets
        tl.debug_barrier()
    _store_state(head, is_open, count, totals, env, row, opened, before, stored, valid, GROUP)
    tl.store(resetting + env, resets.to(tl.uint8), valid & NEXT_STEP)


Given = tuple[torch.Tensor, ...]
"""Leaves of the caller's steps, as contiguous tensors."""


def _environments(*forms: Sequence[Form]) -> int:
    """Number of environments per program."""
    return 1 if any(form[0] * form[2] > NARROW for group in forms for form in group) else 8


def _options(environments: int) -> dict[str, Any]:
    return {"num_warps": 8 if environments == 1 else 4, "enable_fp_fusion": False}


def _set_tiles(forms: Sequence[Form], environments: int) -> tuple[Form, ...]:
    """Set the widest tiles that this number of environments allows; returns the new forms of the leaves."""
    most = words.MAX_COLUMNS if INTERPRETED else min(1024 // environments, 512)
    interleaved = [form[2] > 1 and form[3] == 1 for form in forms]  # whether frames are stacked along the last axis
    limits = [most // 2 if each else most for each in interleaved]
    columns = [min(triton.next_power_of_2(max(form[0], 1)), limit) for form, limit in zip(forms, limits, strict=True)]
    return tuple((form[0], wide, *form[2:]) for form, wide in zip(forms, columns, strict=True))


def _widen(leaf: Leaf) -> Leaf:
    """View a leaf of wide rows as words of eight bytes, if its rows and their pieces are divisible by eight."""
    width, _, k, inner, zero = leaf.form
    size = leaf.words.element_size()
    if width * k <= NARROW or width * size % 8 or (k > 1 and inner * size % 8):
        return leaf
    words = width * size // 8
    as_longs = as_words(leaf.words, torch.empty(0, dtype=torch.int64, device="cpu"))
    return Leaf(as_longs, (words, words, k, inner * size // 8, zero))


class StepWriter:
    """Writes steps into rings at fixed addresses."""

    def __init__(
        self, rings: Rings, obs: Sequence[Leaf], nexts: Sequence[Leaf], others: Sequence[Leaf], totals: torch.Tensor,
        faults: tuple[torch.Tensor, torch.Tensor], *, flags: tuple[int, int], next_step: bool,
    ) -> None:  # fmt: skip
        """`totals`: counts by groups of environments, see `draw`. `faults`: counters of bad stacks and environments.

        `flags`: indices of `terminated` and `truncated` in `others`.
        """
        self._rings = rings
        leaves = [[_widen(leaf) for leaf in group] for group in (obs, others, nexts)]
        own_obs, own_others, own_nexts = (tuple(leaf.words for leaf in group) for group in leaves)
        self._words = own_obs, own_obs, own_others
        self._is_widened = any(
            words.dtype != leaf.words.dtype
            for words, leaf in zip((*own_obs, *own_others), (*obs, *others), strict=True)
        )
        forms = [[leaf.form for leaf in group] for group in leaves[:2]]
        self._most = _environments(*forms)
        self._own = (
            own_obs, own_nexts or own_obs, own_others, rings.kind, rings.first, rings.head, rings.open,
            rings.resetting, rings.count, totals, *faults, rings.slots, rings.num_envs, rings.size, rings.alive,
        )  # fmt: skip
        tiles = dict(zip(("OBS", "OTHERS"), (_set_tiles(group, self._most) for group in forms), strict=True))
        self._constants = {
            **tiles, "TERMINATED": flags[0], "TRUNCATED": flags[1], "NEXT_STEP": next_step, "KEEPS_NEXT": bool(nexts),
            "HAS_HISTORY": rings.slots > rings.alive, "GROUP": group_size(rings.num_envs), **_options(self._most),
        }  # fmt: skip
        self._launches: dict[tuple[bool, bool, int], Launch] = {}

    def write(
        self, obs: Given, nexts: Given, others: Given, writers: int, steps: int, envs: torch.Tensor | None,
        touched: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:  # fmt: skip
        """Store steps [steps, writers, …] of all environments or of `envs`, in the order of the leaves.

        `touched` (slots, changed), each [GROUPS, steps, writers], is filled unless None.
        """
        rings = self._rings
        block, programs = blocks(writers, self._most)
        key = envs is not None, touched is not None, block
        launch = self._launches.get(key)
        if launch is None:
            constants = dict(zip(("HAS_ENVS", "KEEPS_TOUCHED", "BLOCK"), key, strict=True))
            launch = self._launches[key] = Launch(write_kernel, self._own, self._constants | constants, self._words)
        if self._is_widened:
            obs, nexts, others = (tuple(map(_align, given)) for given in (obs, nexts, others))
        slots, changed = (rings.head, rings.kind) if touched is None else touched
        launch(
            rings.kind, (programs, 1, 1), obs, nexts, others, rings.head if envs is None else envs, slots, changed,
            writers, steps,
        )  # fmt: skip


def _align(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its address is not divisible by eight."""
    return tensor.clone() if tensor.data_ptr() % 8 else tensor


_RINGS = {"kind": "*u8", "first": "*u8", "head": "*i64", "is_open": "*u8", "resetting": "*u8", "count": "*i64"}
_RINGS |= {"totals": "*i64", "broken": "*i64", "unknown_envs": "*i64"}


def _variant(name: str, obs: Sequence[tuple[str, Form]], **constants: Any) -> Variant:
    observed, rest = tuple(word for word, _ in obs), tuple(word for word, _ in _REST)
    types = {"obs_given": observed, "next_given": observed, "others_given": rest}
    types |= {"envs": "*i64", "touched": "*i64", "changed": "*u8"}
    types |= {"obs": observed, "next_stored": observed, "others": rest, **_RINGS}
    aligned = tuple(types)
    types |= {"writers": "i32", "steps": "i32", **dict.fromkeys(("slots", "num_envs", "size", "alive"), "i64")}
    flags = dict.fromkeys(("NEXT_STEP", "KEEPS_NEXT", "HAS_ENVS", "KEEPS_TOUCHED", "HAS_HISTORY"), False)
    forms = {"OBS": [form for _, form in obs], "OTHERS": [form for _, form in _REST]}
    block = _environments(*forms.values())
    forms = {group: _set_tiles(leaves, block) for group, leaves in forms.items()}
    constants = {**flags, **constants, **forms, **_FLAGS, "GROUP": 64, "BLOCK": block}
    return Variant(write_kernel, name, types, constants, _options(block), aligned)


_FLAGS = {"TERMINATED": 2, "TRUNCATED": 3}
_ROBOT = ("*i32", (48, 64, 1, 1, False))
_ONE = (1, 1, 1, 1, False)
_REST = [("*i32", (12, 16, 1, 1, False)), ("*i32", _ONE), ("*u8", _ONE), ("*u8", _ONE)]
_IMAGE = ("*i64", (3_528, 1, 1, 1, False))
_STACK = ("*u8", (7_056, 1, 4, 1, False))
_ZEROS = ("*i64", (882, 1, 4, 882, True))

VARIANTS = (
    _variant("48 floats, prioritized", [_ROBOT], KEEPS_TOUCHED=True),
    _variant("48 floats, NEXT_STEP, env_ids", [_ROBOT], NEXT_STEP=True, HAS_ENVS=True),
    _variant("48 floats, next_obs stored", [_ROBOT], KEEPS_NEXT=True),
    _variant("an image and 48 floats", [_IMAGE, _ROBOT]),
    _variant("4 stacked frames", [_STACK], HAS_HISTORY=True),
    _variant("4 stacked frames along the first axis, zeros", [_ZEROS], HAS_HISTORY=True),
)
