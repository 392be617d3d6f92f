"""Leaves as words: integers of at most eight bytes, which kernels copy and compare without knowing what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Kernels run by Triton's interpreter, whose time is per operation and not per element: tiles are large there."""
MOST_INTERPRETED = 1024
"""Items of a program there."""
MOST_COLUMNS = 1 << 14 if INTERPRETED else 128
"""The largest number of columns in a tile of words."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

Form = tuple[int, int, int, int, bool]
"""The form of a leaf, for kernels: words of a row, columns of a tile, frames k, inner, pads by zeros; see `Frames`."""


class Frames(NamedTuple):
    """How the frames of a stack lie in what a caller gives and gets; of a plain leaf there is one."""

    k: int = 1
    inner: int = 1
    """How many words of a frame are neighbours in the stack."""
    zero: bool = False
    """The frames before an episode's first one are zeros, and not that frame again."""


class Leaf(NamedTuple):
    """A tensor [slots, num_envs, …] of rows, or of single frames."""

    words: torch.Tensor
    form: Form

    @staticmethod
    def of(column: torch.Tensor, frames: Frames, most: int) -> Leaf:
        """A leaf whose tiles have at most `most` columns."""
        words = as_words(column)
        width = words.numel() // (column.shape[0] * column.shape[1])
        per_item = width // max(column[0, 0].numel(), 1)
        return Leaf(
            words, (width, min(triton.next_power_of_2(width), most), frames.k, frames.inner * per_item, frames.zero)
        )


def as_words(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A contiguous tensor's memory as flat integers of its item size, or of the dtype of `like`."""
    # As strided: an axis of length one may have any stride, which a view of another dtype minds.
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    word = _INTEGERS[tensor.element_size()] if like is None else like.dtype
    return (torch.view_as_real(flat).view(-1) if tensor.is_complex() else flat).view(word)


@dataclass(frozen=True)
class Rings:
    """The state of the rings of all environments, flags as bytes: see `replay/ring.py`."""

    kind: torch.Tensor
    first: torch.Tensor
    head: torch.Tensor
    open: torch.Tensor
    resetting: torch.Tensor
    count: torch.Tensor
    floor: torch.Tensor
    slots: int
    num_envs: int
    alive: int

    @property
    def size(self) -> int:
        """How many flat slots there are."""
        return self.slots * self.num_envs


def blocks(count: int, most: int) -> tuple[int, int]:
    """How many items a program takes of `count`, `most` of them on a GPU, and how many programs there are.

    Another count must not compile a kernel again.
    """
    block = min(triton.next_power_of_2(max(count, 1)), MOST_INTERPRETED) if INTERPRETED else most
    return block, -(-count // block)
