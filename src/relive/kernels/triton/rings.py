"""Memory of a replay buffer for kernels: the state of its rings, the layouts of its leaves, and slot arithmetic.

Slots are computed as in `replay/ring.py`. Flat slots and rows are int64. Leaves are copied and compared as words,
which are integers of at most eight bytes, whatever their dtype is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import INTERPRETED, as_words

EMPTY = tl.constexpr(0)
TRANSITION = tl.constexpr(1)
FINAL = tl.constexpr(2)
PENDING = tl.constexpr(3)
HISTORY = tl.constexpr(4)
MAX_COLUMNS = 1 << 14 if INTERPRETED else 128
"""Maximum number of words in a row of a tile."""


@dataclass(frozen=True)
class Rings:
    """State of the rings of all environments, as in `replay/ring.py`, but with flags as bytes."""

    kind: torch.Tensor
    first: torch.Tensor
    head: torch.Tensor
    open: torch.Tensor
    resetting: torch.Tensor
    count: torch.Tensor
    floor: torch.Tensor
    slots: int
    num_envs: int
    num_sampleable: int

    @property
    def size(self) -> int:
        """Number of flat slots."""
        return self.slots * self.num_envs


LeafLayout = tuple[int, int, int, int, bool]
"""Layout of a leaf, a constant of kernels: words per row and tile, and `k`, `inner`, `zero` of its `FrameLayout`."""
WIDTH, TILE, FRAMES, INNER, ZERO = (tl.constexpr(i) for i in range(5))


class FrameLayout(NamedTuple):
    """Memory layout of the frames of a stack; a plain leaf has one frame."""

    k: int = 1
    inner: int = 1
    """Number of adjacent elements of a frame in the stack."""
    zero: bool = False
    """Whether frames before the start of an episode are zeros instead of repeating its first frame."""


class Leaf(NamedTuple):
    """A tensor [slots, num_envs, …] of rows, or of single frames."""

    words: torch.Tensor
    layout: LeafLayout

    @staticmethod
    def from_column(column: torch.Tensor, frames: FrameLayout, max_columns: int) -> Leaf:
        """Make the leaf of a tensor; kernels read it in tiles of at most `max_columns` columns."""
        words = as_words(column)
        width = words.numel() // (column.shape[0] * column.shape[1])
        per_item = width // max(column[0, 0].numel(), 1)
        return Leaf(
            words,
            (width, min(triton.next_power_of_2(width), max_columns), frames.k, frames.inner * per_item, frames.zero),
        )


@triton.jit
def find_frame(column, frame, LAYOUT: tl.constexpr):
    """Return the positions of one frame's words in a stack."""
    word = column
    if LAYOUT[FRAMES] > 1:
        word = column // LAYOUT[INNER] * (LAYOUT[FRAMES] * LAYOUT[INNER]) + column % LAYOUT[INNER]
        word += frame * LAYOUT[INNER]
    return word


@triton.jit
def get_slot(row, env, slots, num_envs):
    """Return the flat slots of non-negative row numbers."""
    return row % slots * num_envs + env


@triton.jit
def step_forward(flat, steps, num_envs, size):
    """Return the flat slots `steps` rows later; `steps` is less than the number of slots."""
    target = flat + steps * num_envs
    return tl.where(target >= size, target - size, target)


@triton.jit
def step_back(flat, steps, num_envs, size):
    """Return the flat slots `steps` rows earlier; `steps` is less than the number of slots."""
    target = flat - steps * num_envs
    return tl.where(target < 0, target + size, target)


@triton.jit
def get_newest_row(head, is_open, env, mask):
    """Return the newest row numbers of environments."""
    return tl.load(head + env, mask, other=0) - 1 + tl.load(is_open + env, mask, other=0).to(tl.int64)


@triton.jit
def get_row(flat, newest, slots, num_envs):
    """Return the numbers of the rows at flat slots, computed from the newest row number of each environment."""
    age = (newest - flat // num_envs) % slots
    return newest - tl.where(age < 0, age + slots, age)
