"""rl-buffer's `SumTree`: priorities in a ring, searched by their running sum."""

from __future__ import annotations

from array import array

import numpy as np

from relive.errors import NotReadyError, PriorityError, explain
from relive.schema.checks import check_positive_int


class SumTree:
    """A tree of `capacity` priorities, which are written in turn or by index, and searched by their running sum."""

    def __init__(self, capacity: int) -> None:
        self.capacity = check_positive_int("capacity", capacity)
        self.data_pointer = 0
        self._first_leaf = 1 << (self.capacity - 1).bit_length()
        self._sums = array("d", bytes(16 * self._first_leaf))
        """A heap: the children of node i are 2i and 2i + 1, node 1 is the total, and the leaves are in order.

        Single items of an `array` are read faster than those of a numpy array.
        """

    def add(self, priority: float) -> None:
        """Write the next priority of the ring."""
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
        self._write_priority(int(idx), float(priority))

    def _write_priority(self, idx: int, priority: float) -> None:
        sums, node = self._sums, idx + self._first_leaf
        sums[node] = priority
        # Sums are computed from their two children, because adding differences would accumulate rounding errors.
        while node > 1:
            priority += sums[node ^ 1]
            node >>= 1
            sums[node] = priority

    def get(self, s: float) -> tuple[int, float]:
        """Return the first index whose running sum exceeds `s`, and the priority at this index, which is never 0."""
        sums, node = self._sums, 1
        if not sums[1] > 0:
            raise NotReadyError(
                explain("get", "a priority above 0", "only zeros", "Call update with a positive priority first.")
            )
        while node < self._first_leaf:
            node *= 2
            left = sums[node]
            if (s >= left and sums[node + 1] > 0) or not left > 0:
                s -= left
                node += 1
        return node - self._first_leaf, sums[node]

    @property
    def total_priority(self) -> float:
        """Sum of all priorities."""
        return self._sums[1]

    @property
    def tree(self) -> np.ndarray:
        """A copy of the sums and leaves as a heap `[2 · capacity − 1]`: the children of i are 2i + 1 and 2i + 2."""
        heap = np.zeros(2 * self.capacity - 1)
        heap[self.capacity - 1 :] = np.frombuffer(self._sums)[self._first_leaf :][: self.capacity]
        for level in reversed(range(self.capacity.bit_length())):
            nodes = np.arange(2**level - 1, min(2 ** (level + 1), self.capacity) - 1)
            heap[nodes] = heap[2 * nodes + 1] + heap[2 * nodes + 2]
        # The copy is read-only, because a write to it would be lost.
        heap.flags.writeable = False
        return heap
