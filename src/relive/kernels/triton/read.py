"""Reading of batches in one launch: leaves of rows, next observations, n-step reward sums and ids.

A row is given by its flat slot; a slot of -1 reads zeros. A leaf has a layout (`rings.LeafLayout`) and an anchor, the
row at which the leaf is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import INTERPRETED, SIZES, BoundKernel, split_into_programs
from relive.kernels.triton.rings import (
    FRAMES,
    MAX_COLUMNS,
    TILE,
    TRANSITION,
    WIDTH,
    ZERO,
    FrameLayout,
    Leaf,
    LeafLayout,
    Rings,
    find_frame,
    get_newest_row,
    get_row,
    step_back,
    step_forward,
)

AT_ROW = tl.constexpr(0)
"""Anchor of a leaf that is read at the drawn row."""
AT_LAST = tl.constexpr(1)
"""Anchor of a leaf that is read at the last of the n steps."""
AT_NEXT = tl.constexpr(2)
"""Anchor of a leaf that is read at the row after the last step."""
AT_FIRST = tl.constexpr(3)
"""Anchor of a leaf that is read at the first row of a sequence: one item per sequence."""
CHUNK = 1 << 20 if INTERPRETED else 2048
"""Maximum number of words of a row that one program copies."""


@triton.jit
def _copy_leaf(stored, out, first, slot, item, mask, start, stop, num_envs, size, LAYOUT: tl.constexpr):
    """Copy words `start` to `stop` of the rows at slots [B] to items of `out`, rebuilding stacks from frames."""
    is_row = mask & (slot >= 0)
    for begin in range(start, stop, LAYOUT[TILE]):
        column = begin + tl.arange(0, LAYOUT[TILE])
        in_row = (column < LAYOUT[WIDTH])[None, :]
        frame_slot = slot
        has_started = slot < 0
        for age in range(LAYOUT[FRAMES]):
            words = tl.load(
                stored + frame_slot[:, None] * LAYOUT[WIDTH] + column[None, :], is_row[:, None] & in_row, other=0
            )
            if LAYOUT[ZERO]:
                words = tl.where(has_started[:, None], 0, words)
            word = find_frame(column, LAYOUT[FRAMES] - 1 - age, LAYOUT)
            if LAYOUT[FRAMES] > 1:
                has_started |= tl.load(first + frame_slot, is_row, other=0) != 0
                frame_slot = tl.where(has_started, frame_slot, step_back(frame_slot, 1, num_envs, size))
            tl.store(
                out + item[:, None] * (LAYOUT[WIDTH] * LAYOUT[FRAMES]) + word[None, :], words, mask[:, None] & in_row
            )


@triton.jit
def _count_steps(kind, slot, is_row, num_envs, size, n, STEPS: tl.constexpr):
    """Count the steps from each row on: up to n, fewer at the end of the episode or at the newest row."""
    step = tl.arange(0, STEPS)
    step_slot = step_forward(slot[:, None], step[None, :].to(tl.int64), num_envs, size)
    inside = is_row[:, None] & (step < n)[None, :]
    is_step = tl.load(kind + step_slot, inside, other=0) == TRANSITION
    # Step 0 is the row itself, which always counts as a step.
    ends = tl.where(is_step | (step == 0)[None, :], n, step[None, :])
    return tl.min(ends, axis=1).to(tl.int64)


@triton.jit
def _to_bfloat16(x):
    """Round float32 to the nearest bfloat16, as float32: the cast of the interpreter rounds some numbers wrongly."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)  # noqa: PLR0124 (NaN)


@triton.jit
def _sum_rewards(reward, out, slot, item, mask, num_steps, num_envs, size, n, gamma, LAYOUT: tl.constexpr):
    """Sum γ^i r over the steps, in the order and dtype of the native core."""
    number = reward.dtype.element_ty
    is_row = mask & (slot >= 0)
    for start in range(0, LAYOUT[WIDTH], LAYOUT[TILE]):
        column = start + tl.arange(0, LAYOUT[TILE])
        in_row = (column < LAYOUT[WIDTH])[None, :]
        total = tl.load(reward + slot[:, None] * LAYOUT[WIDTH] + column[None, :], is_row[:, None] & in_row, other=0)
        if number == tl.bfloat16:
            total = total.to(tl.float32)
        factor = tl.full((), 1.0, tl.float64)
        step_slot = slot
        for step in range(1, n):
            step_slot = step_forward(step_slot, 1, num_envs, size)
            factor = factor * gamma
            is_step = is_row & (num_steps > step)
            term = tl.load(
                reward + step_slot[:, None] * LAYOUT[WIDTH] + column[None, :], is_step[:, None] & in_row, other=0
            )
            if number == tl.bfloat16:
                term = term.to(tl.float32)
            term = term.to(tl.float64) * factor
            # Like torch, round a product to float32, then to 16 bits. A sum of two 16-bit floats is rounded once,
            # because float32 holds it exactly enough.
            if number == tl.bfloat16:
                term = _to_bfloat16(total + _to_bfloat16(term.to(tl.float32)))
            elif number == tl.float16:
                term = (total.to(tl.float32) + term.to(tl.float32).to(number).to(tl.float32)).to(number)
            else:
                term = total + term.to(number)
            total = tl.where(is_step[:, None], term, total)
        tl.store(out + item[:, None] * LAYOUT[WIDTH] + column[None, :], total.to(number), mask[:, None] & in_row)


@triton.jit
def _compute_discount(num_steps, n, gamma):
    """Return γ^k for k steps, as float32."""
    power = tl.full((), 1.0, tl.float64)
    factor = num_steps.to(tl.float64) * 0.0
    for step in range(1, n + 1):
        power = power * gamma
        factor = tl.where(num_steps == step, power, factor)
    return factor.to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
    outs, flat_slots, sums, ids, discounts, rows: tl.int64, length: tl.int64, n: tl.int32, gamma: tl.float64,
    sources, rewards, kind, first, head, is_open, slots: tl.int64, num_envs: tl.int64, size: tl.int64,
    LAYOUTS: tl.constexpr, ANCHORS: tl.constexpr, FIRST_PIECES: tl.constexpr, REWARDS: tl.constexpr,
    HAS_IDS: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read all leaves of `rows` rows. Along the second grid axis, programs from 1 on read pieces of wide leaves."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.program_id(1)
    valid = position < rows
    slot = tl.load(flat_slots + position, valid, other=-1)
    is_row = slot >= 0
    last = slot
    num_steps = position * 0 + 1
    if STEPS > 0:
        num_steps = _count_steps(kind, slot, is_row, num_envs, size, n, STEPS)
        last = tl.where(is_row, step_forward(slot, num_steps - 1, num_envs, size), slot)
    next_slot = tl.where(is_row, step_forward(last, 1, num_envs, size), slot)
    for i in tl.static_range(len(LAYOUTS)):
        anchor_slot = slot
        if ANCHORS[i] == AT_LAST:
            anchor_slot = last
        if ANCHORS[i] == AT_NEXT:
            anchor_slot = next_slot
        item = position
        mask = valid
        if ANCHORS[i] == AT_FIRST:
            item = position // length
            mask = valid & (position % length == 0)
        start = (piece - FIRST_PIECES[i]) * CHUNK
        if (start >= 0) & (start < LAYOUTS[i][WIDTH]):
            stop = tl.minimum(start + CHUNK, LAYOUTS[i][WIDTH])
            _copy_leaf(
                sources[i], outs[i], first, anchor_slot, item, mask, start, stop, num_envs, size,
                tl.constexpr(LAYOUTS[i]),
            )  # fmt: skip
    if piece == 0:
        for i in tl.static_range(len(REWARDS)):
            _sum_rewards(
                rewards[i], sums[i], slot, position, valid, num_steps, num_envs, size, n, gamma,
                tl.constexpr(REWARDS[i]),
            )  # fmt: skip
        if STEPS > 0:
            tl.store(discounts + position, _compute_discount(num_steps, n, gamma), valid)
        if HAS_IDS:
            newest = get_newest_row(head, is_open, slot % num_envs, valid)
            row = get_row(slot, newest, slots, num_envs)
            tl.store(ids + position, row * num_envs + slot % num_envs, valid)


class Source(NamedTuple):
    """A leaf to read, and its anchor."""

    leaf: Leaf
    anchor: int


class RowReader:
    """Reads the same leaves for many batches."""

    def __init__(
        self, rings: Rings, sources: Sequence[Source], rewards: Sequence[tuple[torch.Tensor, LeafLayout]] = ()
    ) -> None:
        """Bind the leaves to read. `rewards` are flat float tensors with their layouts, to be summed over n steps."""
        layouts = tuple(source.leaf.layout for source in sources)
        self._reward_layouts = tuple(layout for _, layout in rewards)
        self._placeholder = rings.head
        pieces, self._pieces = [], 1
        for layout in layouts:
            is_cut = layout[0] > CHUNK
            pieces.append(self._pieces if is_cut else 0)
            self._pieces += triton.cdiv(layout[0], CHUNK) if is_cut else 0
        words = tuple(source.leaf.words for source in sources)
        fixed = words, tuple(reward for reward, _ in rewards) or (rings.head,)
        state = rings.kind, rings.first, rings.head, rings.open, rings.slots, rings.num_envs, rings.size
        self._launch = BoundKernel(
            read_kernel, (*fixed, *state), (words,), LAYOUTS=layouts,
            ANCHORS=tuple(source.anchor for source in sources), FIRST_PIECES=tuple(pieces), CHUNK=CHUNK, num_warps=2,
        )  # fmt: skip

    def read(
        self, slots: torch.Tensor, outs: Sequence[torch.Tensor], ids: torch.Tensor | None = None, *, length: int = 1,
        n: int = 0, gamma: float = 0.0, sums: Sequence[torch.Tensor] = (), discount: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Fill `outs`, in the order of the sources. `length` is the number of steps per sequence in `slots`."""
        rows = slots.numel()
        block, programs = split_into_programs(rows, 16 if self._pieces == 1 else 8)
        self._launch(
            slots, (programs, self._pieces, 1), tuple(outs), slots, tuple(sums) or (self._placeholder,),
            slots if ids is None else ids, slots if discount is None else discount, rows, length, n, float(gamma),
            REWARDS=self._reward_layouts if n else (), HAS_IDS=ids is not None,
            STEPS=1 << (n - 1).bit_length() if n else 0, BLOCK=block,
        )  # fmt: skip


class TritonGather:
    """A `ItemReader` of contiguous columns whose first `lead` axes number the items. It always pads: -1 reads zeros."""

    def __init__(self, columns: Sequence[torch.Tensor], lead: int) -> None:
        items = [column.flatten(0, lead - 1) for column in columns]
        self._item_layouts = [(item.shape[1:], item.dtype, item.device) for item in items]
        self._nonempty_columns = [i for i, item in enumerate(items) if item.numel()]
        leaves = [Leaf.from_column(items[i].unsqueeze(1), FrameLayout(), MAX_COLUMNS) for i in self._nonempty_columns]
        self._reader = RowReader(_make_placeholder_rings(items[0]), [Source(leaf, AT_ROW.value) for leaf in leaves])

    def take(self, index: torch.Tensor, start: int, stop: int, padded: bool = False) -> list[torch.Tensor]:
        count = stop - start
        out = [torch.empty((count, *shape), dtype=dtype, device=device) for shape, dtype, device in self._item_layouts]
        self._read_into(index, start, stop, out)
        return out

    def take_into(
        self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor], padded: bool = False
    ) -> None:
        whole = [target if target.is_contiguous() else torch.empty_like(target).contiguous() for target in out]
        self._read_into(index, start, stop, whole)
        for target, values in zip(out, whole, strict=True):
            if values is not target:
                target.copy_(values)

    def _read_into(self, index: torch.Tensor, start: int, stop: int, out: list[torch.Tensor]) -> None:
        if stop > start and self._nonempty_columns:
            rows = index[start:stop].contiguous()
            self._reader.read(rows, [out[i] for i in self._nonempty_columns])


def _make_placeholder_rings(column: torch.Tensor) -> Rings:
    """Make rings for plain items, whose state `read_kernel` does not access."""
    numbers, flags = (torch.empty(1, dtype=dtype, device=column.device) for dtype in (torch.int64, torch.uint8))
    return Rings(flags, flags, numbers, flags, flags, numbers, numbers, len(column), 1, len(column))
