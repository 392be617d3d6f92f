"""Rows on CUDA and ROCm devices, written, drawn and read by Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from relive.kernels import complete
from relive.kernels.priority import PriorityTree
from relive.kernels.triton.draw import draw_slots
from relive.kernels.triton.priority_tree import TritonTree
from relive.kernels.triton.stream import DeviceStream
from relive.kernels.triton.words import as_words
from relive.kernels.triton.write import GROUPS, Given, StepWriter
from relive.replay.read_plan import ReadPlan
from relive.replay.ring import MOST_ROWS
from relive.replay.row_memory import RowMemory
from relive.replay.store import PlanReader, Touched
from relive.replay.torch_store import TorchStore
from relive.replay.triton_reader import TritonReader, has_kernels, leaves_of, rings_of


class TritonStore(TorchStore):
    """A `ReplayStore` of few launches: one for a write of any number of steps, two for a uniform sample.

    Writes, uniform and prioritized draws, and reads of slots do not wait for the device. What Triton has no kernel for
    runs on torch ops. Under Triton's interpreter host memory is treated as a device's. Draws differ from those of other
    stores with the same seed; among Triton's they are the same on every device.
    """

    def __init__(self, memory: RowMemory) -> None:
        super().__init__(memory)
        self._waits = self.counter.is_on = False
        self._rings = rings_of(memory)
        leaves, nexts = leaves_of(memory)
        others = [i for i in range(len(leaves)) if i not in memory.observed]
        self._groups = memory.observed, others
        """The leaves of observations, and the other ones."""
        obs, rest = ([leaves[i] for i in which] for which in self._groups)
        terminated, truncated = (
            others.index(self.schema.leaf_indices[name][0]) for name in ("terminated", "truncated")
        )
        self._writer = StepWriter(
            self._rings, obs, nexts, rest, memory.broken, flags=(terminated, truncated), next_step=memory.next_step
        )
        self._keeps_touched = False

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        count = 1 if steps is None else steps
        if self._rows_left < MOST_ROWS * count:
            self._rows_left = self.memory.ring.require_rows_left(count)
        fitted, fitted_nexts = self.memory.conformed(leaves, nexts, envs, steps)
        given = [as_words(leaf) for leaf in fitted]
        writers = self.num_envs if envs is None else len(envs)
        obs, others = (tuple(given[i] for i in which) for which in self._groups)
        block = Given(obs, tuple(map(as_words, fitted_nexts)), others, count, writers)
        self._writer.write(block, envs, self._room_for_touched(count, writers))
        self._forget_tables()
        self.is_empty = False
        self._rows_left -= MOST_ROWS * count
        if then is not None:
            complete(then)

    def _room_for_touched(self, steps: int, writers: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._keeps_touched:
            return None
        slots = torch.empty(steps * GROUPS * writers, dtype=torch.int64, device=self.device)
        changed = torch.empty_like(slots, dtype=torch.bool)
        self._touched = slots, changed
        return slots, changed.view(torch.uint8)

    def keep_touched(self) -> None:
        self._keeps_touched = True

    def touched(self) -> Touched:
        return self._touched

    # Drawing

    def random(self, seed: int | None) -> DeviceStream:
        return DeviceStream(seed, self.device)

    def draw(self, count: int, random: Any) -> torch.Tensor:
        return draw_slots(self._rings, random.numbers, count)

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
