"""Reading of batches in one launch: leaves of rows, next observations, n-step reward sums and ids.

Rows are flat slots; -1 reads zeros. A leaf has a form (see `words.Form`) and a place: OWN, LAST, NEXT or START.
"""

# Jitted functions are Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import SIZES, Launch, Variant
from relive.kernels.triton.rings import TRANSITION, Rings, earlier, later, row_of
from relive.kernels.triton.words import INTERPRETED, MAX_COLUMNS, Form, Frames, Leaf, blocks

OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}

OWN = tl.constexpr(0)
"""Place of a leaf that is read at the drawn row."""
LAST = tl.constexpr(1)
"""Place of a leaf that is read at the last of the n steps."""
NEXT = tl.constexpr(2)
"""Place of a leaf that is read at the row after the last step."""
CHUNK = 1 << 20 if INTERPRETED else 2048
"""Maximum number of words of a row that one program copies."""
START = tl.constexpr(3)
"""Place of a leaf that is read at the first row of a sequence: one item per sequence."""


@triton.jit
def _copy(stored, out, first, slot, item, where, start, stop, num_envs, size, FORM: tl.constexpr):
    """Copy words `start` to `stop` of the rows at slots [B] to items of `out`, rebuilding stacks from frames."""
    some = where & (slot >= 0)
    for begin in range(start, stop, FORM[1]):
        column = begin + tl.arange(0, FORM[1])
        within = (column < FORM[0])[None, :]
        at = slot
        started = slot < 0
        for back in range(FORM[2]):
            words = tl.load(stored + at[:, None] * FORM[0] + column[None, :], some[:, None] & within, other=0)
            if FORM[4]:
                words = tl.where(started[:, None], 0, words)
            word = column
            if FORM[2] > 1:
                frame = FORM[2] - 1 - back
                word = column // FORM[3] * (FORM[2] * FORM[3]) + frame * FORM[3] + column % FORM[3]
                started |= tl.load(first + at, some, other=0) != 0
                at = tl.where(started, at, earlier(at, 1, num_envs, size))
            tl.store(out + item[:, None] * (FORM[0] * FORM[2]) + word[None, :], words, where[:, None] & within)


@triton.jit
def _steps_taken(kind, slot, some, num_envs, size, n, N: tl.constexpr):
    """Number of steps per row: up to n, until the end of the episode or the newest row."""
    step = tl.arange(0, N)
    at = later(slot[:, None], step[None, :].to(tl.int64), num_envs, size)
    inside = some[:, None] & (step < n)[None, :]
    is_step = tl.load(kind + at, inside, other=0) == TRANSITION
    # The row itself is always a step.
    ends = tl.where(is_step | (step == 0)[None, :], n, step[None, :])
    return tl.min(ends, axis=1).to(tl.int64)


@triton.jit
def _to_bfloat16(x):
    """Round float32 to the nearest bfloat16, as float32: the cast of the interpreter rounds some numbers wrongly."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)  # noqa: PLR0124 (NaN)


@triton.jit
def _sum_rewards(reward, out, slot, item, where, taken, num_envs, size, n, gamma, FORM: tl.constexpr):
    """Sum γ^i r over the steps, in the order and dtype of the native core."""
    number = reward.dtype.element_ty
    some = where & (slot >= 0)
    for start in range(0, FORM[0], FORM[1]):
        column = start + tl.arange(0, FORM[1])
        within = (column < FORM[0])[None, :]
        total = tl.load(reward + slot[:, None] * FORM[0] + column[None, :], some[:, None] & within, other=0)
        if number == tl.bfloat16:
            total = total.to(tl.float32)
        factor = tl.full((), 1.0, tl.float64)
        at = slot
        for step in range(1, n):
            at = later(at, 1, num_envs, size)
            factor = factor * gamma
            here = some & (taken > step)
            more = tl.load(reward + at[:, None] * FORM[0] + column[None, :], here[:, None] & within, other=0)
            if number == tl.bfloat16:
                more = more.to(tl.float32)
            more = more.to(tl.float64) * factor
            # Round like torch: to float32, then to half. The sum of two halves is exact enough in float32.
            if number == tl.bfloat16:
                more = _to_bfloat16(total + _to_bfloat16(more.to(tl.float32)))
            elif number == tl.float16:
                more = (total.to(tl.float32) + more.to(tl.float32).to(number).to(tl.float32)).to(number)
            else:
                more = total + more.to(number)
            total = tl.where(here[:, None], more, total)
        tl.store(out + item[:, None] * FORM[0] + column[None, :], total.to(number), where[:, None] & within)


@triton.jit
def _discount(taken, n, gamma):
    """γ^k for k steps, as float32."""
    power = tl.full((), 1.0, tl.float64)
    factor = taken.to(tl.float64) * 0.0
    for step in range(1, n + 1):
        power = power * gamma
        factor = tl.where(taken == step, power, factor)
    return factor.to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
    outs, slots_given, sums, ids, discounts, rows: tl.int64, length: tl.int64, n: tl.int32, gamma: tl.float64,
    sources, rewards, kind, first, head, is_open, slots: tl.int64, num_envs: tl.int64, size: tl.int64,
    FORMS: tl.constexpr, PLACES: tl.constexpr, PIECES: tl.constexpr, REWARDS: tl.constexpr,
    HAS_IDS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read all leaves of `rows` rows. From 1 on, the second grid axis enumerates pieces of wide leaves."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.program_id(1)
    valid = place < rows
    slot = tl.load(slots_given + place, valid, other=-1)
    some = slot >= 0
    last = slot
    taken = place * 0 + 1
    if N > 0:
        taken = _steps_taken(kind, slot, some, num_envs, size, n, N)
        last = tl.where(some, later(slot, taken - 1, num_envs, size), slot)
    following = tl.where(some, later(last, 1, num_envs, size), slot)
    for i in tl.static_range(len(FORMS)):
        at = slot
        if PLACES[i] == LAST:
            at = last
        if PLACES[i] == NEXT:
            at = following
        item = place
        where = valid
        if PLACES[i] == START:
            item = place // length
            where = valid & (place % length == 0)
        start = (piece - PIECES[i]) * CHUNK
        if (start >= 0) & (start < FORMS[i][0]):
            stop = tl.minimum(start + CHUNK, FORMS[i][0])
            _copy(sources[i], outs[i], first, at, item, where, start, stop, num_envs, size, tl.constexpr(FORMS[i]))
    if piece == 0:
        for i in tl.static_range(len(REWARDS)):
            _sum_rewards(
                rewards[i], sums[i], slot, place, valid, taken, num_envs, size, n, gamma, tl.constexpr(REWARDS[i])
            )
        if N > 0:
            tl.store(discounts + place, _discount(taken, n, gamma), valid)
        if HAS_IDS:
            row = row_of(slot, head, is_open, slots, num_envs, valid)
            tl.store(ids + place, row * num_envs + slot % num_envs, valid)


def _rows(pieces: int) -> int:
    """Rows per program: fewer if wide leaves are read in pieces."""
    return 16 if pieces == 1 else 8


class Source(NamedTuple):
    """A leaf to read and its place: OWN, LAST, NEXT or START."""

    leaf: Leaf
    place: int


class RowReader:
    """Reads fixed leaves of many batches."""

    def __init__(
        self, rings: Rings, sources: Sequence[Source], rewards: Sequence[tuple[torch.Tensor, Form]] = ()
    ) -> None:
        """`rewards` are flat float tensors with their forms, summed over n steps."""
        self._rings, self._launches = rings, dict[tuple[bool, int, int], Launch]()
        self._words = tuple(source.leaf.words for source in sources)
        self._forms = tuple(source.leaf.form for source in sources)
        self._places = tuple(source.place for source in sources)
        self._rewards, self._reward_forms = tuple(r for r, _ in rewards), tuple(form for _, form in rewards)
        pieces, self._pieces = [], 1
        for form in self._forms:
            wide = form[0] > CHUNK
            pieces.append(self._pieces if wide else 0)
            self._pieces += triton.cdiv(form[0], CHUNK) if wide else 0
        self._starts = tuple(pieces)

    def read(
        self, slots: torch.Tensor, outs: Sequence[torch.Tensor], ids: torch.Tensor | None = None, *, length: int = 1,
        n: int = 0, gamma: float = 0.0, sums: Sequence[torch.Tensor] = (), discount: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Fill `outs` in the order of the sources. `length`: steps per sequence in `slots`."""
        rings, rows = self._rings, slots.numel()
        block, programs = blocks(rows, _rows(self._pieces))
        key = ids is not None, _power_of_two(n), block
        launch = self._launches.get(key) or self._bind(key)
        launch(
            slots, (programs, self._pieces, 1), tuple(outs), slots, tuple(sums) or (rings.head,),
            slots if ids is None else ids, slots if discount is None else discount, rows, length, n, float(gamma),
        )  # fmt: skip

    def _bind(self, key: tuple[bool, int, int]) -> Launch:
        rings, (has_ids, steps, block) = self._rings, key
        own = self._words, self._rewards or (rings.head,), rings.kind, rings.first, rings.head, rings.open
        constants = {
            "FORMS": self._forms, "PLACES": self._places, "PIECES": self._starts,
            "REWARDS": self._reward_forms if steps else (), "HAS_IDS": has_ids, "N": steps, "CHUNK": CHUNK,
            "BLOCK": block, **OPTIONS,
        }  # fmt: skip
        launch = Launch(read_kernel, (*own, rings.slots, rings.num_envs, rings.size), constants, (self._words,))
        self._launches[key] = launch
        return launch


def _power_of_two(n: int) -> int:
    """The smallest power of two of at least n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


class TritonGather:
    """A `Reader` of contiguous columns whose first `lead` axes count items."""

    def __init__(self, columns: Sequence[torch.Tensor], lead: int) -> None:
        items = [column.flatten(0, lead - 1) for column in columns]
        self._forms = [(item.shape[1:], item.dtype, item.device) for item in items]
        self._some = [i for i, item in enumerate(items) if item.numel()]
        """Indices of the columns that are not empty."""
        leaves = [Leaf.of(items[i].unsqueeze(1), Frames(), MAX_COLUMNS) for i in self._some]
        self._reader = RowReader(_placeholder_rings(items[0]), [Source(leaf, OWN.value) for leaf in leaves])

    def take(self, index: torch.Tensor, start: int, stop: int, padded: bool = False) -> list[torch.Tensor]:
        count = stop - start
        out = [torch.empty((count, *shape), dtype=dtype, device=device) for shape, dtype, device in self._forms]
        self._read(index, start, stop, out)
        return out

    def take_into(
        self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor], padded: bool = False
    ) -> None:
        whole = [target if target.is_contiguous() else torch.empty_like(target).contiguous() for target in out]
        self._read(index, start, stop, whole)
        for target, values in zip(out, whole, strict=True):
            if values is not target:
                target.copy_(values)

    def _read(self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor]) -> None:
        if stop > start and self._some:
            rows = index[start:stop].contiguous()
            self._reader.read(rows, [out[i] for i in self._some])  # an index of -1 gives zeros


def _placeholder_rings(column: torch.Tensor) -> Rings:
    """Placeholder state of rings for plain items, which `read_kernel` does not access."""
    numbers, flags = (torch.empty(1, dtype=dtype, device=column.device) for dtype in (torch.int64, torch.uint8))
    return Rings(flags, flags, numbers, flags, flags, numbers, numbers, len(column), 1, len(column))


_RINGS = {"kind": "*u8", "first": "*u8", "head": "*i64", "is_open": "*u8"}


def _variant(
    name: str, leaves: Sequence[tuple[str, Form, int]], rewards: Sequence[str] = (), n: int = 0, length: int = 1,
    pieces: Sequence[int] | None = None,
) -> Variant:  # fmt: skip
    words = tuple(word for word, _, _ in leaves)
    numbers = tuple(f"*{number}" for number in rewards) or ("*i64",)
    types = {"outs": words, "slots_given": "*i64", "sums": numbers, "ids": "*i64", "discounts": "*fp32"}
    types |= {"sources": words, "rewards": numbers, **_RINGS}
    aligned = tuple(types)
    types |= {**dict.fromkeys(("rows", "length", "slots", "num_envs", "size"), "i64"), "n": "i32", "gamma": "fp64"}
    constants = {
        "FORMS": tuple(form for _, form, _ in leaves), "PLACES": tuple(place for _, _, place in leaves),
        "PIECES": tuple(pieces or [0] * len(leaves)), "REWARDS": tuple((1, 1, 1, 1, False) for _ in rewards),
        "HAS_IDS": length == 1, "N": n, "CHUNK": 2048, "BLOCK": _rows(1 + max(pieces or [0])),
    }  # fmt: skip
    return Variant(read_kernel, name, types, constants, OPTIONS, aligned)


_ROBOT = ("*i32", (48, 64, 1, 1, False))
_ONE = (1, 1, 1, 1, False)
_REST = [("*i32", (12, 16, 1, 1, False), 0), ("*u8", _ONE, 1), ("*u8", _ONE, 1)]
_STACK = ("*u8", (7_056, 128, 4, 1, False))

VARIANTS = (
    _variant("transitions of 48 floats", [(*_ROBOT, 0), *_REST, ("*i32", _ONE, 0), (*_ROBOT, 2)]),
    _variant("3 steps", [(*_ROBOT, 0), *_REST, (*_ROBOT, 2)], ["fp32"], n=4),
    _variant("5 steps, three rewards", [(*_ROBOT, 0), *_REST, (*_ROBOT, 2)], ["fp64", "fp16", "bf16"], n=8),
    _variant("sequences of 16", [(*_ROBOT, 0), *_REST, (*_ROBOT, 2), ("*i16", (256, 128, 1, 1, False), 3)], length=16),
    _variant("4 stacked frames", [(*_STACK, 0), *_REST, (*_STACK, 2)], pieces=[1, 0, 0, 0, 5]),
)
