"""Rows that the C++ core writes, under a torch that it cannot make tensors of."""

from __future__ import annotations

from typing import Any

import torch

from relive.replay import composed
from relive.replay.native_store import NativeStore
from relive.replay.offset_plan import OffsetPlan
from relive.replay.offset_reading import windowed
from relive.replay.row_memory import RowMemory
from relive.replay.store import Leaves


class BridgedStore:
    """A `NativeStore` over `kernels.bridge`: batches are put together leaf by leaf."""

    fuses = has_neighbours = False

    def __init__(self, memory: RowMemory) -> None:
        self._native = NativeStore(memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def __len__(self) -> int:
        return len(self._native)

    def draw_and_read(self, *_: Any, **__: Any) -> None:
        """Not in one go."""

    def transitions(self, slots: torch.Tensor) -> Leaves:
        return composed.transitions(self._native, slots)

    def n_steps(self, slots: torch.Tensor, n: int, gamma: float) -> Leaves:
        return composed.n_steps(self._native, slots, n, gamma)

    def sequences(self, slots: torch.Tensor, before: int, after: int, cross: bool) -> Leaves:
        return composed.sequences(self._native, slots, before, after, cross)

    def windowed(self, slots: torch.Tensor, plan: OffsetPlan) -> Leaves:
        return windowed(self._native, slots, plan)
