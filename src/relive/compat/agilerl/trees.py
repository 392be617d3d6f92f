"""How AgileRL shows priorities: a tree of their sums, and one of their minima."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Priorities:
    leaves: torch.Tensor
    """priority^alpha of every slot."""

    def __getitem__(self, idx: int) -> float:
        """That of one slot."""
        return float(self.leaves[idx])


class SumSegmentTree(_Priorities):
    """priority^alpha of every slot, 0 where nothing is stored."""

    def sum(self, start: int = 0, end: int = 0) -> float:
        """Of the slots from `start` to before `end`, or of all after `start`."""
        return float(self.leaves[start : end or None].sum())


class MinSegmentTree(_Priorities):
    """priority^alpha of every slot, infinite where nothing is stored."""

    def min(self, start: int = 0, end: int = 0) -> float:
        """Of the slots from `start` to before `end`, or of all after `start`."""
        return float(self.leaves[start : end or None].min())
