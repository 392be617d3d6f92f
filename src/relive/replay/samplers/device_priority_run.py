"""Prioritized draws where the tree itself accepts priorities: nothing is computed or looked at on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from relive.errors import InvariantError, explain
from relive.kernels.priority import RingTensors
from relive.randomness import Randomness
from relive.replay.samplers.priority_run import PriorityRun, check_priorities
from relive.replay.store import ReplayStore

if TYPE_CHECKING:
    from relive.replay.samplers.prioritized import Prioritized


class DevicePriorityRun(PriorityRun):
    """A run whose update, draw and marking of a write are launches of the tree, one or two each.

    What only the device knows is skipped and counted there until `check()`: numbers that are no priorities, ids that
    were never given, and draws from a buffer whose priorities are all zero.
    """

    takes_ids = True

    def __init__(self, settings: Prioritized, store: ReplayStore, random: Randomness) -> None:
        super().__init__(settings, store, random)
        self.tree: Any
        self._numbers = [self.tree.largest, 0]
        ring = store.memory.ring
        self._where = RingTensors(ring.kind, ring.head, ring.open, ring.alive)
        if settings.normalize == "global":
            self.tree.smallest()  # from now on it is kept up to date

    @property
    def _largest(self) -> Any:
        return self.tree.largest

    @_largest.setter
    def _largest(self, largest: Any) -> None:
        self.tree.largest.fill_(largest)

    def update(self, slots: torch.Tensor, priority: torch.Tensor) -> torch.Tensor:
        """Set the priorities of rows, whose ids are given; returns how many are gone."""
        check_priorities(priority, len(slots))
        return self.tree.accept(slots, priority, self._settings.alpha, self._settings.eps, self._where)

    def written(self) -> None:
        slots, changed = self._store.touched()
        self.tree.mark(slots, changed, self._ring.kind, self._settings.alpha, self._settings.eps)

    def cleared(self) -> None:
        self.tree.leaves_view().zero_()
        self.tree.rebuild()
        self._largest = 1.0

    def faults(self) -> Iterator[str]:
        bad, foreign, empty = self.tree.faults.tolist()
        if bad:
            expected = "finite numbers of at least 0 (and finite to the power of alpha)"
            yield explain("priority", expected, f"{bad} others, skipped", "Pass absolute errors that are finite.")
        if foreign:
            got, remedy = f"{foreign} others in update_priority, skipped", "Pass ids from batch['index']."
            yield explain("index", "ids of stored transitions", got, remedy)
        if empty:
            remedy = "Update at least one priority to more than 0, or use eps > 0."
            yield explain("sample", "a row of positive priority", f"only zeros in {empty} batches", remedy)

    def check(self) -> None:
        """What the base class verifies, and that nothing was skipped."""
        super().check()
        for fault in self.faults():
            raise InvariantError(fault)
