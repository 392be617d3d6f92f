"""Runs of steps, for recurrent learners and world models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import torch

from relive.errors import SchemaError, explain
from relive.fields.schema import positive
from relive.fields.vocabulary import suggests_init_keywords
from relive.randomness import Randomness
from relive.replay.composed import marked
from relive.replay.store import Leaves, Reading, ReplayStore
from relive.replay.views.protocol import require_order
from relive.replay.write_back import step_index

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
        positive("Sequence.length", self.length, math.inf)  # `check` says what no memory holds
        if isinstance(self.burn_in, bool) or not isinstance(self.burn_in, Integral) or self.burn_in < 0:
            raise SchemaError(
                explain("Sequence.burn_in", "a non-negative int", repr(self.burn_in), "Pass an int of at least 0.")
            )

    @cached_property
    def fused(self) -> Reading | None:
        """The store looks for the steps while it reads, but does not name them."""
        return None if self.step_index else Reading(length=self.length, burn_in=self.burn_in, cross=self.cross_episodes)

    def check(self, store: ReplayStore) -> None:
        """Refuse a buffer whose rows are in no order, and steps that no memory holds."""
        require_order(store, self)
        if self.burn_in + self.length > _MOST_STEPS:
            got = f"{self.burn_in} + {self.length}"
            raise MemoryError(explain("Sequence", f"at most {_MOST_STEPS} steps", got, "Pass a shorter length."))
        if self.step_index and "step_index" in store.schema.names:
            expected, got = "no field called step_index", "an extra field of this name"
            raise SchemaError(explain("Sequence.step_index", expected, got, "Rename the field."))

    def read(self, store: ReplayStore, slots: torch.Tensor, random: Randomness) -> Leaves:
        batch = store.sequences(slots, self.burn_in, self.length, self.cross_episodes)
        if not self.step_index:
            return batch
        windows, _ = store.windows(slots, self.burn_in, self.length, cross=self.cross_episodes)
        return batch | {("step_index",): step_index(store, windows)}

    def windows(self, store: ReplayStore, slots: torch.Tensor) -> torch.Tensor:
        """The steps that are read: [B, L] flat slots, -1 where there is none."""
        if self.cross_episodes:
            remedy = "Pass cross_episodes=False: goals belong to one episode."
            raise SchemaError(explain("Sequence", "one episode", "cross_episodes=True", remedy))
        return store.windows(slots, self.burn_in, self.length)[0]

    def reduce(self, store: ReplayStore, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves:
        """A batch from its steps [B, L, …]."""
        carried = {store.schema.paths[i] for i in store.memory.carried}
        is_first = store.memory.ring.first.view(-1)[windows.clamp(min=0)] & (windows >= 0)
        batch = {path: leaf for path, leaf in steps.items() if path not in carried}
        named = {("step_index",): step_index(store, windows)} if self.step_index else {}
        return batch | marked(store, slots, windows, is_first) | named
