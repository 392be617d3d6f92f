"""Observations as they were given, of a memory that keeps stacks as single frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from relive.kernels.torch_ops import wide
from relive.schema.conversion import bits_of
from relive.schema.fields import Stacked

if TYPE_CHECKING:
    from relive.replay.row_memory import RowMemory


def leaf_at(memory: RowMemory, leaf: int, slots: torch.Tensor) -> torch.Tensor:
    """A leaf at flat slots as bits, the stacks of frames rebuilt."""
    if leaf in memory.stacked:
        return bits_of(rebuilt(memory, leaf, slots))
    return bits_of(memory.leaves[leaf].flatten(0, 1))[slots]


def rebuilt(memory: RowMemory, leaf: int, slots: torch.Tensor) -> torch.Tensor:
    """The stacks at flat slots, of a leaf that is kept as single frames; -1 gives zeros."""
    ring, field = memory.ring, memory.schema.fields[leaf]
    assert isinstance(field, Stacked)
    frames, first = bits_of(memory.leaves[leaf].flatten(0, 1)), ring.first.view(-1)
    at, missing = slots.clamp(min=0), slots < 0
    found, started = [frames[at]], torch.zeros_like(missing)
    for _ in range(field.k - 1):
        started = started | first[at]
        at = torch.where(started, at, ring.before(at))
        frame = frames[at]
        found.append(frame if field.pad == "repeat" else frame.masked_fill(wide(started, frame), 0))
    stack = torch.stack(found[::-1], 1 + field.axis)
    return stack.masked_fill(wide(missing, stack), 0).view(field.dtype)
