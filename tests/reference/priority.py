"""Weighted draws, written out: a list of priorities and exact fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


class SlowTree:
    """Leaves on a line, each as long as its priority. A draw is the leaf at a point of the line."""

    def __init__(self, num_leaves: int) -> None:
        self.leaves = [0.0] * num_leaves

    def set(self, leaves: Sequence[int], priorities: Sequence[float]) -> None:
        for leaf, priority in zip(leaves, priorities, strict=True):
            self.leaves[leaf] = priority

    def total(self) -> Fraction:
        return sum((Fraction(priority) for priority in self.leaves), Fraction(0))

    def smallest(self) -> float:
        return min((priority for priority in self.leaves if priority > 0), default=float("inf"))

    def starts(self) -> list[Fraction]:
        """Start of each leaf on the line, and the end of the line."""
        starts = [Fraction(0)]
        for priority in self.leaves:
            starts.append(starts[-1] + Fraction(priority))
        return starts

    def draw(self, uniforms: Sequence[float]) -> list[int]:
        """Return the leaves at the relative points (i + u) / count of the line, for the i-th u in [0, 1)."""
        starts, count = self.starts(), len(uniforms)
        points = [(i + Fraction(u)) / count * starts[-1] for i, u in enumerate(uniforms)]
        leaves = range(len(self.leaves))
        return [next(leaf for leaf in leaves if starts[leaf] <= point < starts[leaf + 1]) for point in points]

    def may_draw(self, drawn: Sequence[int], tolerance: Fraction) -> bool:
        """Whether the i-th leaf drawn is positive and reaches into the i-th slice, up to a fraction of the total."""
        starts, count = self.starts(), len(drawn)
        slice_, slack = starts[-1] / count, starts[-1] * tolerance
        return all(
            self.leaves[leaf] > 0
            and starts[leaf] <= slice_ * (i + 1) + slack
            and starts[leaf + 1] >= slice_ * i - slack
            for i, leaf in enumerate(drawn)
        )
