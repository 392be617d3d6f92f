"""rl-buffer's `SumTree` on our priority tree."""

from __future__ import annotations

import numpy as np
import torch

from relive.errors import NotReadyError, PriorityError, explain
from relive.fields.schema import positive
from relive.kernels.priority import priority_tree


class SumTree:
    """`capacity` priorities, written in a circle or by number, and found by their running sum."""

    def __init__(self, capacity: int) -> None:
        self.capacity = positive("capacity", capacity)
        self.data_pointer = 0
        self._tree = priority_tree(self.capacity, torch.device("cpu"))

    def add(self, priority: float) -> None:
        """Write the next priority, after the last one the first again."""
        self.update(self.data_pointer, priority)
        self.data_pointer = 0 if self.data_pointer + 1 == self.capacity else self.data_pointer + 1

    def update(self, idx: int, priority: float) -> None:
        """Change one priority."""
        if not 0 <= idx < self.capacity:
            raise IndexError(explain("idx", f"0 to {self.capacity - 1}", idx, "Number priorities from 0."))
        if not 0 <= priority < float("inf"):
            raise PriorityError(
                explain("priority", "a finite number of at least 0", priority, "Pass a priority in that range.")
            )
        self._write(idx, float(priority))

    def _write(self, idx: int, priority: float) -> None:
        self._tree.set(torch.tensor([idx]), priority)

    def get(self, s: float) -> tuple[int, float]:
        """The first number whose running sum lies beyond `s`, and its priority; never one of priority 0."""
        ends = self._leaves.cumsum(0)
        if not ends[-1] > 0:
            raise NotReadyError(
                explain("get", "a priority above 0", "only zeros", "Call update with a positive priority first.")
            )
        last = self._leaves.nonzero()[-1]
        idx = torch.searchsorted(ends, ends.new_tensor([s]), right=True).minimum(last)
        return int(idx), float(self._leaves[idx])

    @property
    def total_priority(self) -> float:
        """The sum of all priorities."""
        return float(self._tree.total())

    @property
    def tree(self) -> np.ndarray:
        """A copy of the sums and leaves as a heap `[2 · capacity − 1]`: below i are 2i + 1 and 2i + 2."""
        heap = np.zeros(2 * self.capacity - 1)
        heap[self.capacity - 1 :] = self._leaves.cpu()
        for level in reversed(range(self.capacity.bit_length())):
            at = np.arange(2**level - 1, min(2 ** (level + 1), self.capacity) - 1)
            heap[at] = heap[2 * at + 1] + heap[2 * at + 2]
        return heap

    @property
    def _leaves(self) -> torch.Tensor:
        return self._tree.leaves_view()[: self.capacity]
