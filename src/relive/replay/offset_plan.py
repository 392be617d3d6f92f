"""What a `Window` reads of a buffer's rows: groups of leaves, each at offsets of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from relive.fields.schema import Path, Schema


class Counted(IntEnum):
    """What offsets count, from the drawn row on."""

    STEPS = 0
    """The steps of its episode."""
    OBSERVATIONS = 1
    """The observations of its episode: one more, the one that the last step led to."""
    NEXT_OBSERVATIONS = 2
    """The same, from the observation on that the row, or the last of its n steps, led to."""


class OffsetGroup(NamedTuple):
    """Leaves that are read at the same offsets."""

    path: Path
    """What was named."""
    offsets: tuple[int, ...]
    counted: Counted
    leaves: tuple[int, ...]
    """Of the schema; for next observations, those of the observation."""

    @property
    def is_next(self) -> bool:
        """Whether they are read as next observations."""
        return self.counted == Counted.NEXT_OBSERVATIONS

    @property
    def mask(self) -> Path:
        """Where a batch says which offsets lie in the episode."""
        return (f"{self.path[0]}_mask", *self.path[1:])


@dataclass(frozen=True, eq=False)
class OffsetPlan:
    """A batch of rows in which the leaves of `groups` have an axis of offsets, and the others are read once per row."""

    schema: Schema
    groups: tuple[OffsetGroup, ...]
    zeros: bool
    """Outside the episode there are zeros, instead of the nearest step."""
    n: int
    """0: what has no offsets is read as transitions. More: so many steps as one."""
    gamma: float

    @cached_property
    def leaf_groups(self) -> list[int]:
        """The group of each leaf, -1 for none."""
        return self._groups(is_next=False, leaves=range(len(self.schema.paths)))

    @cached_property
    def next_groups(self) -> list[int]:
        """The group of each leaf of the next observation, -1 for none."""
        return self._groups(is_next=True, leaves=self.schema.leaf_indices["obs"])

    def _groups(self, *, is_next: bool, leaves: range | tuple[int, ...]) -> list[int]:
        groups = {g: each for g, each in enumerate(self.groups) if each.is_next == is_next}
        return [next((g for g, each in groups.items() if i in each.leaves), -1) for i in leaves]

    @cached_property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """The offsets of each group in observations or steps from the drawn row on, if n is at most 1."""
        return tuple(tuple(offset + group.is_next for offset in group.offsets) for group in self.groups)

    def reach(self, slots: int) -> tuple[int, int]:
        """How many steps before and after a row are looked at, in a ring of so many slots."""
        last = max(self.n, 1) - 1
        before, after = 0, last
        for group, steps in zip(self.groups, self.steps, strict=True):
            before = max(before, -min(steps))
            after = max(after, max(steps) - (group.counted != Counted.STEPS) + (last if group.is_next else 0))
        return min(before, slots - 1), min(after, slots - 1)
