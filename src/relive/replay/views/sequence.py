"""Runs of steps, for recurrent learners and world models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

from relive.errors import SchemaError, explain
from relive.replay.read_plan import ReadPlan, sequence_plan
from relive.schema.checks import positive
from relive.schema.fields import Schema
from relive.schema.vocabulary import suggests_init_keywords

_MOST_STEPS = 2**30


@suggests_init_keywords
@dataclass(frozen=True)
class Sequence:
    """`burn_in + length` steps [B, L, …] around each drawn row, which is the first trained one.

    Burn-in lies before it, as much of its episode as is still stored, so that its length varies by row. Real steps come
    first and padding, which is zero, only at the end: position 0 is always real, and `Carry` fields [B, …] are its
    state. "mask" says which steps are real, "train" which of them are no burn-in, "is_first" which start an episode.
    "index" and "weight" are those of the drawn row.

    Args:
        length: steps to train on, at least 1.
        burn_in: at most so many steps before them, for a recurrent network to find its state.
        cross_episodes: go on into the next episode, where "is_first" says that the state starts anew; otherwise a
            sequence ends with its episode.
        step_index: add "step_index" [B, L], the "index" of every step and -1 where there is none, for `write` and
            `update_priority`.
    """

    length: int
    burn_in: int = 0
    cross_episodes: bool = False
    step_index: bool = False

    def __post_init__(self) -> None:
        positive("Sequence.length", self.length, math.inf)  # `plan` says what no memory holds
        if isinstance(self.burn_in, bool) or not isinstance(self.burn_in, Integral) or self.burn_in < 0:
            raise SchemaError(
                explain("Sequence.burn_in", "a non-negative int", repr(self.burn_in), "Pass an int of at least 0.")
            )

    def plan(self, schema: Schema) -> ReadPlan:
        if self.burn_in + self.length > _MOST_STEPS:
            got = f"{self.burn_in} + {self.length}"
            raise MemoryError(explain("Sequence", f"at most {_MOST_STEPS} steps", got, "Pass a shorter length."))
        if self.step_index and "step_index" in schema.names:
            expected, got = "no field called step_index", "an extra field of this name"
            raise SchemaError(explain("Sequence.step_index", expected, got, "Rename the field."))
        return sequence_plan(schema, self.burn_in, self.length, self.cross_episodes, self.step_index)
