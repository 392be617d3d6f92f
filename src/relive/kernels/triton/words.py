"""Leaves as words: integers of at most eight bytes, which kernels copy and compare regardless of the dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels. Its cost is per operation, not per element: tiles are large then."""
MAX_INTERPRETED = 1024
"""Items per program under the interpreter."""
MAX_COLUMNS = 1 << 14 if INTERPRETED else 128
"""Largest number of columns in a tile of words."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

Form = tuple[int, int, int, int, bool]
"""Layout of a leaf for kernels: words per row, columns per tile, and `k`, `inner` and `zero` of its `Frames`."""


class Frames(NamedTuple):
    """Memory layout of the frames of a stack; a plain leaf has one frame."""

    k: int = 1
    inner: int = 1
    """Adjacent words of a frame in the stack."""
    zero: bool = False
    """Whether frames before the start of an episode are zeros instead of repeating its first frame."""


class Leaf(NamedTuple):
    """A tensor [slots, num_envs, …] of rows, or of single frames."""

    words: torch.Tensor
    form: Form

    @staticmethod
    def of(column: torch.Tensor, frames: Frames, max_columns: int) -> Leaf:
        """Make a leaf whose tiles have at most `max_columns` columns."""
        words = as_words(column)
        width = words.numel() // (column.shape[0] * column.shape[1])
        per_item = width // max(column[0, 0].numel(), 1)
        return Leaf(
            words,
            (width, min(triton.next_power_of_2(width), max_columns), frames.k, frames.inner * per_item, frames.zero),
        )


def as_words(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """View a contiguous tensor as flat integers of its item size, or of the dtype of `like`."""
    # as_strided: axes of length one may have any stride, with which `view` of another dtype fails.
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    word = _INTEGERS[tensor.element_size()] if like is None else like.dtype
    return (torch.view_as_real(flat).view(-1) if tensor.is_complex() else flat).view(word)


def blocks(count: int, per_program: int) -> tuple[int, int]:
    """Items per program, and number of programs for `count` items. On a GPU a program always takes `per_program` items.

    The size must not depend on the count, which would trigger compilation.
    """
    block = min(triton.next_power_of_2(max(count, 1)), MAX_INTERPRETED) if INTERPRETED else per_program
    return block, -(-count // block)
