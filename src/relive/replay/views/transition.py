"""One step: where it started, what was done, what came of it, where it led."""

from __future__ import annotations

from dataclasses import dataclass

from relive.replay.read_plan import ReadPlan, row_plan
from relive.schema.fields import Schema


@dataclass(frozen=True)
class Transition:
    """Every field of the row and `next_obs`, the state it led to before any reset."""

    def plan(self, schema: Schema) -> ReadPlan:
        return row_plan(schema)
