"""Stored rows written again by torch ops, on any device and without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from relive.replay.row_memory import RowMemory
from relive.schema.conversion import bits_of


def rewriting(memory: RowMemory, slots: torch.Tensor, leaves: Mapping[int, torch.Tensor]) -> Callable[[], None]:
    """A change that writes K > 0 rows of leaves to flat slots [K]: none for -1, the last of those that a slot is given.

    A device may write the rows of one slot in any order. So each row takes the values of the last row for its slot, and
    a row without a slot is written as the row of the highest slot is.
    """
    order = slots.argsort(stable=True)
    ordered = slots[order]
    highest = ordered[-1]
    target = torch.where(slots < 0, highest, slots)
    last = order[torch.searchsorted(ordered, target, right=True) - 1]
    has_row, at = highest >= 0, target.clamp(min=0)
    columns = {i: bits_of(memory.leaves[i].flatten(0, 1)) for i in leaves}
    rows = {i: torch.where(has_row, bits_of(values)[last], columns[i][at]) for i, values in leaves.items()}

    def change() -> None:
        for i, column in columns.items():
            column[at] = rows[i]

    return change
