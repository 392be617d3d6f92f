"""Rows that the C++ core writes, under a torch that it cannot make tensors of."""

from __future__ import annotations

import torch

from relive.replay import composed
from relive.replay.native_store import NativeStore
from relive.replay.offset_plan import OffsetPlan
from relive.replay.offset_reading import windowed
from relive.replay.row_memory import RowMemory
from relive.replay.store import Leaves


class BridgedStore(NativeStore):
    """A `NativeStore` over `kernels.bridge`: batches are put together leaf by leaf."""

    def __init__(self, memory: RowMemory) -> None:
        super().__init__(memory)
        self.fuses = self.has_neighbours = False

    def transitions(self, slots: torch.Tensor) -> Leaves:
        return composed.transitions(self, slots)

    def n_steps(self, slots: torch.Tensor, n: int, gamma: float) -> Leaves:
        return composed.n_steps(self, slots, n, gamma)

    def sequences(self, slots: torch.Tensor, before: int, after: int, cross: bool) -> Leaves:
        return composed.sequences(self, slots, before, after, cross)

    def windowed(self, slots: torch.Tensor, plan: OffsetPlan) -> Leaves:
        return windowed(self, slots, plan)
