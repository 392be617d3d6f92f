"""Writing steps into the rings of environments: one launch for a step or a block of steps, whatever the rows hold.

A program has a few environments to itself, so no two programs write the same row, and a block is a loop inside. In each
step a program first reads what its decisions need (heads, kinds, the pending observations), then passes a barrier, then
writes: all warps read the same, and one of them stores it.

A leaf has a form (words of a row, columns of a tile, frames k, inner, pads by zeros); see `words.Frames`.
"""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from relive.kernels.triton import words
from relive.kernels.triton.launching import launch
from relive.kernels.triton.slots import FINAL, HISTORY, PENDING, TRANSITION, earlier, slot_of
from relive.kernels.triton.variants import Variant
from relive.kernels.triton.words import INTERPRETED, Form, Leaf, Rings, blocks

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
NARROW = 256
"""Words of a row up to which a program takes several environments."""


@triton.jit
def given_words(base, item, column, frame, where, FORM: tl.constexpr):
    """The words [E, C] of one frame of the items [E] that a caller gave."""
    word = column
    if FORM[2] > 1:
        word = column // FORM[3] * (FORM[2] * FORM[3]) + frame * FORM[3] + column % FORM[3]
    inside = where[:, None] & (column < FORM[0])[None, :]
    return tl.load(base + item[:, None] * (FORM[0] * FORM[2]) + word[None, :], inside, other=0)


@triton.jit
def _differing(a, b):
    """Which rows of two tiles differ: int32 [E]."""
    return tl.max((a != b).to(tl.int32), axis=1)


@triton.jit
def _differs(stored, given, first, pending, item, valid, num_envs, size, FORM: tl.constexpr):
    """Whether the given observations are, in any bit, not the ones that the pending rows hold: int32 [E]."""
    differs = valid.to(tl.int32) * 0
    for start in range(0, FORM[0], FORM[1]):
        column = start + tl.arange(0, FORM[1])
        inside = valid[:, None] & (column < FORM[0])[None, :]
        at = pending
        started = pending < 0
        for back in range(FORM[2]):
            kept = tl.load(stored + at[:, None] * FORM[0] + column[None, :], inside, other=0)
            if FORM[4]:
                kept = tl.where(started[:, None], 0, kept)
            differs |= _differing(kept, given_words(given, item, column, FORM[2] - 1 - back, valid, FORM))
            if FORM[2] > 1:
                started |= tl.load(first + at, valid, other=0) != 0
                at = tl.where(started, at, earlier(at, 1, num_envs, size))
    return differs


@triton.jit
def _misstacked(given, following, item, valid, same, resets, FORM: tl.constexpr):
    """How many of the steps have stacks that single frames cannot rebuild."""
    unpadded = valid.to(tl.int32) * 0
    unfollowed = unpadded
    for start in range(0, FORM[0], FORM[1]):
        column = start + tl.arange(0, FORM[1])
        newest = given_words(given, item, column, FORM[2] - 1, valid, FORM)
        younger = newest
        padding = newest
        if FORM[4]:
            padding = newest * 0
        for back in range(1, FORM[2]):
            shown = given_words(given, item, column, FORM[2] - 1 - back, valid, FORM)
            unpadded |= _differing(shown, padding)
            unfollowed |= _differing(given_words(following, item, column, FORM[2] - 1 - back, valid, FORM), younger)
            younger = shown
    bad = valid & ~resets & ((~same & (unpadded > 0)) | (unfollowed > 0))
    return tl.sum(bad.to(tl.int64), axis=0)


@triton.jit
def _store(stored, slot, given, item, where, FORM: tl.constexpr):
    """Copy items to slots; of a stack the newest frame."""
    for start in range(0, FORM[0], FORM[1]):
        column = start + tl.arange(0, FORM[1])
        words = given_words(given, item, column, FORM[2] - 1, where, FORM)
        tl.store(
            stored + slot[:, None] * FORM[0] + column[None, :], words, where[:, None] & (column < FORM[0])[None, :]
        )


@triton.jit
def _leaves_window(kind, row, env, where, slots, num_envs, alive):
    """The slots that are no longer drawn when these rows are the newest, and which of them hold transitions."""
    old = row - alive
    leaving = slot_of(tl.maximum(old, 0), env, slots, num_envs)
    held = tl.load(kind + leaving, where, other=0)
    return leaving, where & (old >= 0) & (held == TRANSITION)


@triton.jit
def _store_leaves(leaves, slot, given, item, where, FORMS: tl.constexpr):
    """`_store` every leaf."""
    for i in tl.static_range(len(FORMS)):
        _store(leaves[i], slot, given[i], item, where, tl.constexpr(FORMS[i]))


@triton.jit
def _continues(
    obs, given, following, first, pending, item, valid, opened, resets, broken, num_envs, size, OBS: tl.constexpr
):
    """Which steps start with the pending observation. Stacks that cannot be rebuilt are counted."""
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
def _tell(touched, changed, at, slot, which, valid):
    """Say which slots became transitions, or no longer are."""
    tl.store(touched + at, slot, valid)
    tl.store(changed + at, which.to(tl.uint8), valid)


@triton.jit
def write_kernel(
    obs, obs_given, next_given, next_stored, others, others_given, envs,
    kind, first, head, is_open, resetting, count, broken, touched, changed,
    slots, num_envs, size, alive, writers, steps,
    OBS: tl.constexpr, OTHERS: tl.constexpr, TERMINATED: tl.constexpr, TRUNCATED: tl.constexpr,
    NEXT_STEP: tl.constexpr, KEEPS_NEXT: tl.constexpr,
    HAS_ENVS: tl.constexpr, KEEPS_TOUCHED: tl.constexpr, HAS_HISTORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store `steps` steps [steps, writers] of all environments or of `envs`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < writers
    env = tl.load(envs + place, valid, other=0) if HAS_ENVS else place
    row = tl.load(head + env, valid, other=0)
    opened = tl.load(is_open + env, valid, other=0) != 0
    resets = (tl.load(resetting + env, valid, other=0) != 0) if NEXT_STEP else place < 0
    stored = tl.load(count + env, valid, other=0)
    for t in range(steps):
        item = (tl.full((), 0, tl.int64) + t) * writers + place
        pending = slot_of(row, env, slots, num_envs)
        same = _continues(
            obs, obs_given, next_given, first, pending, item, valid, opened, resets, broken, num_envs, size, OBS
        )
        cut = valid & opened & ~resets & ~same
        fresh = valid & (~opened | cut)
        row += cut.to(tl.int64)
        slot = slot_of(row, env, slots, num_envs)
        leaving, dies = _leaves_window(kind, row, env, fresh, slots, num_envs, alive)
        # Rows whose next observation is stored beside them have no row after them to make room for.
        moves = valid & (place < 0) if KEEPS_NEXT else valid
        next_leaving, next_dies = _leaves_window(kind, row + 1, env, moves, slots, num_envs, alive)
        ends = _ended(others_given[TERMINATED], others_given[TRUNCATED], item, valid) & ~resets
        closes = place < 0 if NEXT_STEP or KEEPS_NEXT else ends
        tl.debug_barrier()
        if HAS_HISTORY:
            tl.store(kind + leaving, _byte(env, HISTORY), dies)
            tl.store(kind + next_leaving, _byte(env, HISTORY), next_dies)
            tl.debug_barrier()  # with one row of history, a slot that leaves is the one that the next row takes
        tl.store(kind + pending, _byte(env, FINAL), cut)
        tl.store(kind + slot, tl.where(resets, FINAL, TRANSITION).to(tl.uint8), valid)
        tl.store(first + slot, _byte(env, 1), fresh)
        _store_leaves(obs, slot, obs_given, item, fresh, OBS)
        _store_leaves(others, slot, others_given, item, valid, OTHERS)
        if not KEEPS_NEXT:
            next_slot = slot_of(row + 1, env, slots, num_envs)
            tl.store(first + next_slot, resets.to(tl.uint8), valid)
            tl.store(kind + next_slot, tl.where(closes, FINAL, PENDING).to(tl.uint8), valid)
            opened = ~closes
            _store_leaves(obs, next_slot, next_given, item, valid, OBS)
        else:
            _store_leaves(next_stored, slot, next_given, item, valid, OBS)
        if KEEPS_TOUCHED:
            _tell(touched, changed, item, leaving, dies, valid)
            _tell(touched, changed, item + steps * writers, slot, ~resets, valid)
            _tell(touched, changed, item + 2 * steps * writers, next_leaving, next_dies, valid)
        stored += (~resets).to(tl.int64) - dies.to(tl.int64) - next_dies.to(tl.int64)
        row += 1 + closes.to(tl.int64)
        resets = ends if NEXT_STEP else resets
        tl.debug_barrier()
    tl.store(head + env, row, valid)
    tl.store(count + env, stored, valid)
    tl.store(is_open + env, opened.to(tl.uint8), valid)
    tl.store(resetting + env, resets.to(tl.uint8), valid & NEXT_STEP)


GROUPS = 3
"""How many slots a step of an environment may touch."""


class Given(NamedTuple):
    """Steps [steps, writers, …] as words, in the order of the leaves that they are for."""

    obs: tuple[torch.Tensor, ...]
    nexts: tuple[torch.Tensor, ...]
    others: tuple[torch.Tensor, ...]
    steps: int
    writers: int


def _environments(*forms: Sequence[Form]) -> int:
    """How many environments a program takes."""
    return 1 if any(form[0] * form[2] > NARROW for group in forms for form in group) else 8


def _tiled(forms: Sequence[Form], environments: int) -> tuple[Form, ...]:
    """Forms whose tiles are as wide as so many environments allow."""
    most = words.MOST_COLUMNS if INTERPRETED else min(1024 // environments, 512)
    columns = [min(triton.next_power_of_2(form[0]), most // 2 if form[2] > 1 else most) for form in forms]
    return tuple((form[0], wide, *form[2:]) for form, wide in zip(forms, columns, strict=True))


class StepWriter:
    """Writes steps into rings; all memory is known from the beginning."""

    def __init__(
        self, rings: Rings, obs: Sequence[Leaf], nexts: Sequence[Leaf], others: Sequence[Leaf], broken: torch.Tensor, *,
        flags: tuple[int, int], next_step: bool,
    ) -> None:  # fmt: skip
        """`flags`: which of the other leaves are `terminated` and `truncated`."""
        self._flags = flags
        self._rings, self._broken, self._next_step = rings, broken, next_step
        self._obs, self._others = (tuple(leaf.words for leaf in leaves) for leaves in (obs, others))
        self._nexts, self._keeps_next = tuple(leaf.words for leaf in nexts or obs), bool(nexts)
        forms = [[leaf.form for leaf in leaves] for leaves in (obs, others)]
        self._most = _environments(*forms)
        self._forms = [_tiled(group, self._most) for group in forms]

    def write(self, given: Given, envs: torch.Tensor | None, touched: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Store steps of all environments or of `envs`; `touched` [GROUPS, steps, writers] is filled where wanted."""
        rings = self._rings
        block, programs = blocks(given.writers, self._most)
        slots, changed = (rings.head, rings.kind) if touched is None else touched
        launch(write_kernel, rings.kind, programs)(
            self._obs, given.obs, given.nexts, self._nexts, self._others, given.others,
            rings.head if envs is None else envs,
            rings.kind, rings.first, rings.head, rings.open, rings.resetting, rings.count, self._broken, slots, changed,
            rings.slots, rings.num_envs, rings.size, rings.alive, given.writers, given.steps,
            OBS=self._forms[0], OTHERS=self._forms[1], TERMINATED=self._flags[0], TRUNCATED=self._flags[1],
            NEXT_STEP=self._next_step, KEEPS_NEXT=self._keeps_next,
            HAS_ENVS=envs is not None, KEEPS_TOUCHED=touched is not None, HAS_HISTORY=rings.slots > rings.alive,
            BLOCK=block, **OPTIONS,
        )  # fmt: skip


_RINGS = {"kind": "*u8", "first": "*u8", "head": "*i64", "is_open": "*u8", "resetting": "*u8", "count": "*i64"}


def _variant(
    name: str, obs: Sequence[tuple[str, Form]], sizes: str = "i32", **constants: bool
) -> Variant:  # fmt: skip
    observed, rest = tuple(word for word, _ in obs), tuple(word for word, _ in _REST)
    types = {"obs": observed, "obs_given": observed, "next_given": observed, "next_stored": observed}
    types |= {"others": rest, "others_given": rest, "envs": "*i64"}
    types |= _RINGS | {"broken": "*i64", "touched": "*i64", "changed": "*u8"}
    aligned = tuple(types)
    types |= dict.fromkeys(("slots", "num_envs", "size", "alive", "writers", "steps"), sizes)
    flags = dict.fromkeys(("NEXT_STEP", "KEEPS_NEXT", "HAS_ENVS", "KEEPS_TOUCHED", "HAS_HISTORY"), False)
    forms = {"OBS": [form for _, form in obs], "OTHERS": [form for _, form in _REST]}
    block = _environments(*forms.values())
    forms = {group: _tiled(leaves, block) for group, leaves in forms.items()}
    constants = {**flags, **constants}
    return Variant(write_kernel, name, types, {**forms, **_FLAGS, **constants, "BLOCK": block}, OPTIONS, aligned)


_FLAGS = {"TERMINATED": 2, "TRUNCATED": 3}
_ROBOT = ("*i32", (48, 64, 1, 1, False))
_ONE = (1, 1, 1, 1, False)
_REST = [("*i32", (12, 16, 1, 1, False)), ("*i32", _ONE), ("*u8", _ONE), ("*u8", _ONE)]
_IMAGE = ("*u8", (28_224, 1, 1, 1, False))
_STACK = ("*u8", (7_056, 1, 4, 1, False))
_ZEROS = ("*u8", (7_056, 1, 4, 7_056, True))

VARIANTS = (
    _variant("48 floats, prioritized", [_ROBOT], KEEPS_TOUCHED=True),
    _variant("48 floats, NEXT_STEP, env_ids, int64", [_ROBOT], "i64", NEXT_STEP=True, HAS_ENVS=True),
    _variant("48 floats, next_obs stored", [_ROBOT], KEEPS_NEXT=True),
    _variant("an image and 48 floats", [_IMAGE, _ROBOT]),
    _variant("4 stacked frames", [_STACK], HAS_HISTORY=True),
    _variant("4 stacked frames along the first axis, zeros", [_ZEROS], HAS_HISTORY=True),
)
