"""Drawing rows uniformly by a table of all slots."""

from __future__ import annotations

import torch

from relive.fields.invariants import require_all
from relive.randomness import Randomness
from relive.replay.ring import TRANSITION, Ring


class RunningShares:
    """Which part of all transitions lies up to each flat slot [S · N]; kept until something is written."""

    def __init__(self, ring: Ring, *, keeps: bool) -> None:
        self._ring, self._keeps = ring, keeps
        self.shares: torch.Tensor | None = None

    def forget(self) -> None:
        """Something was written."""
        self.shares = None

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        """Slots of transitions [count], uniformly and with replacement."""
        shares = self.shares if self.shares is not None else self._counted()
        self.shares = shares if self._keeps else None
        return torch.searchsorted(shares, random.uniform(count, shares.device), right=True)

    def _counted(self) -> torch.Tensor:
        # Of integers torch would make shares in float32, too coarse for many rows.
        counts = (self._ring.kind.view(-1) == TRANSITION).cumsum(0, dtype=torch.float64)
        shares = counts / counts[-1]
        shares[-1] = 1.0  # it is, unless there are no transitions: then a draw is wrong, but inside
        return shares

    def check(self) -> None:
        """What is kept is what would be counted now."""
        if self.shares is not None:
            drawable = (self._ring.kind == TRANSITION).view(-1)
            expected = drawable.cumsum(0).double() / int(drawable.sum())
            require_all(self.shares == expected, "running shares", "the shares of the transitions", self.shares)
