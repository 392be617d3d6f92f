"""Rows that the C++ core writes, under a torch that it cannot make tensors of."""

from __future__ import annotations

from relive.replay.native_store import NativeStore
from relive.replay.read_plan import ReadPlan
from relive.replay.store import PlanReader
from relive.replay.torch_reader import TorchReader


class BridgedStore(NativeStore):
    """A `NativeStore` over `kernels.bridge`: batches are put together leaf by leaf."""

    def reader(self, plan: ReadPlan) -> PlanReader:
        return TorchReader(self, plan)
