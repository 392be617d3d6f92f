"""Rows on CUDA and ROCm devices, written, drawn and read by Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from relive.kernels import complete
from relive.kernels.priority import PriorityTree
from relive.kernels.triton.draw import RowDrawer, group_totals
from relive.kernels.triton.priority_tree import TritonTree
from relive.kernels.triton.stream import DeviceStream
from relive.kernels.triton.write import GROUPS, StepWriter
from relive.replay.read_plan import ReadPlan
from relive.replay.ring import MOST_ROWS
from relive.replay.row_memory import RowMemory
from relive.replay.samplers.prioritized import is_capturing
from relive.replay.store import PlanReader, Touched
from relive.replay.torch_store import TorchStore
from relive.replay.triton_reader import TritonReader, has_kernels, leaves_of, rings_of
from relive.schema.invariants import require_all


class TritonStore(TorchStore):
    """A `ReplayStore` of few launches: one for a write of any number of steps, two for a uniform sample.

    Writes, uniform and prioritized draws, and reads of slots do not wait for the device. What Triton has no kernel for
    runs on torch ops. Under Triton's interpreter host memory is treated as a device's. Draws differ from those of other
    stores with the same seed; among Triton's they are the same on every device.
    """

    def __init__(self, memory: RowMemory) -> None:
        super().__init__(memory)
        self._waits = self.counter.is_on = False
        self._rings = rings = rings_of(memory)
        self._totals = group_totals(memory.ring.count)
        """How many transitions there are in groups of environments, for draws; writes keep it up to date."""
        self._drawer = RowDrawer(rings, self._totals)
        self._may_be_replayed = False
        """A write was captured in a CUDA graph: rows may come without the host's knowledge."""
        leaves, nexts = leaves_of(memory)
        others = [i for i in range(len(leaves)) if i not in memory.observed]
        self._groups = memory.observed, others
        """The leaves of observations, and the other ones."""
        obs, rest = ([leaves[i] for i in which] for which in self._groups)
        terminated, truncated = (
            others.index(self.schema.leaf_indices[name][0]) for name in ("terminated", "truncated")
        )
        self._writer = StepWriter(
            rings, obs, nexts, rest, self._totals, (memory.broken, memory.unknown_envs), flags=(terminated, truncated),
            next_step=memory.next_step,
        )  # fmt: skip
        self._keeps_touched = False
        self._touched: tuple[torch.Tensor, torch.Tensor] | None = None

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        count = 1 if steps is None else steps
        if self._rows_left < MOST_ROWS * count:
            self._rows_left = self.memory.ring.require_rows_left(count)
        if envs is not None or steps is not None or not self.memory.fits(leaves, nexts):
            leaves, nexts = self.memory.conformed(leaves, nexts, envs, steps)
        writers = self.num_envs if envs is None else len(envs)
        obs, others = (tuple([leaves[i] for i in which]) for which in self._groups)
        touched = self._room_for_touched(count * GROUPS.value * writers) if self._keeps_touched else None
        self._writer.write(obs, nexts, others, writers, count, envs, touched)
        self.is_empty = False
        self._may_be_replayed |= is_capturing(self.device)
        self._rows_left -= MOST_ROWS * count
        if then is not None:
            complete(then)

    def _room_for_touched(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the slots that a write touches, which is used again by the next one of the same size."""
        if self._touched is None or len(self._touched[0]) != count:
            slots = torch.empty(count, dtype=torch.int64, device=self.device)
            self._touched = slots, torch.empty_like(slots, dtype=torch.bool)
        return self._touched

    def keep_touched(self) -> None:
        self._keeps_touched = True

    def touched(self) -> Touched:
        assert self._touched is not None  # asked after a write
        return self._touched

    def clear(self) -> None:
        super().clear()
        self._totals.zero_()

    def found(self) -> None:
        super().found()
        self._totals.copy_(group_totals(self.memory.ring.count))

    @property
    def maybe_empty(self) -> bool:
        if not (self.is_empty and self._may_be_replayed):
            return self.is_empty
        return not is_capturing(self.device) and not len(self)

    # Drawing

    def random(self, seed: int | None) -> DeviceStream:
        return DeviceStream(seed, self.device)

    def draw(self, count: int, random: Any) -> torch.Tensor:
        return self._drawer.draw(random.numbers, count)

    def tree(self) -> PriorityTree:
        if self._tree is None:
            self._tree = TritonTree(self.memory.ring.kind.numel() + 1, self.device)
        return self._tree

    # Reading

    def reader(self, plan: ReadPlan) -> PlanReader:
        return TritonReader(self.memory, plan) if has_kernels(plan) else super().reader(plan)

    # Naming

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """An id that was never given is taken for one whose row is gone: looking would be a synchronisation."""
        return self.memory.ring.locate(ids)[0]

    # Verifying

    def check(self) -> None:
        super().check()
        expected = group_totals(self.memory.ring.count)
        require_all(self._totals == expected, "totals of groups", "the sums of counts", self._totals)

    def _check_is_empty(self, written: bool) -> None:
        if not self._may_be_replayed:
            super()._check_is_empty(written)
