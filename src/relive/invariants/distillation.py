"""What is true of a distillation buffer."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from relive.border import dotted
from relive.invariants.require import require, require_all, require_form

if TYPE_CHECKING:
    from relive.distillation import DistillationBuffer


def check_distillation(buffer: DistillationBuffer) -> None:
    """The ring is inside its columns, these are as they were declared, and rounds begin one after the other."""
    ring, schema, columns, starts = buffer._ring, buffer._schema, buffer._columns, buffer._starts
    require(ring.capacity == buffer.capacity, "capacity", buffer.capacity, ring.capacity)
    require(0 <= ring.floor <= ring.head, "rows", f"a first row of 0 to {ring.head}", ring.floor)
    require(columns or not ring.head, "fields", "columns before the first row", f"0 columns for {ring.head} rows")
    require(len(columns) in (0, len(schema.fields)), "fields", f"{len(schema.fields)} columns", len(columns))
    for path, field, column in zip(schema.paths, schema.fields, columns, strict=False):
        require_form(dotted(path), column, (buffer.capacity, *field.shape), field.dtype, buffer.device)
    in_order = all(one <= other for one, other in pairwise([0, *starts, ring.head]))
    require(starts and starts[0] == 0 and in_order, "rounds", f"first rows from 0 to {ring.head}, in order", starts)
    require_form("rounds", buffer._starts_there, (len(starts),), torch.int64, buffer.device)
    if buffer.device.type != "meta":  # which has no values to look at
        found = buffer._starts_there
        require_all(
            found == torch.tensor(starts, device=found.device), "rounds", "equal first rows on the device", found
        )
