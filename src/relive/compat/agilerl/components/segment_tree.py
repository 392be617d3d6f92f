"""AgileRL's segment trees: binary heaps of sums or of minima; the number of leaves is a power of two."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from relive.compat.agilerl.rows import find_original_class
from relive.errors import explain


class SegmentTree(find_original_class("components.segment_tree", "SegmentTree")):
    """Computes `operation` over ranges of `capacity` leaves, which are `init_value` at first.

    `tree` is the heap `[2 · capacity]`: node i is the operation of nodes 2i and 2i + 1, and the leaves come last.
    """

    def __init__(self, capacity: int, operation: Callable[[Any, Any], Any], init_value: float) -> None:
        if capacity <= 0 or capacity & (capacity - 1):
            raise AssertionError(explain("capacity", "1, 2, 4, 8, …", capacity, "Round it up to a power of two."))
        self.capacity = capacity
        self.operation = operation
        self.tree = np.full(2 * capacity, init_value, np.float64)
        self._combine = np.add if operation is operator.add else np.minimum
        self._on_write: Callable[[Any, Any], None] | None = None

    @classmethod
    def from_leaves(cls: Any, leaves: np.ndarray, on_write: Callable[[Any, Any], None]) -> Any:
        """Make a tree with these leaves; it calls `on_write(indices, values)` before every later write."""
        tree: Any = cls(1 << (len(leaves) - 1).bit_length())
        tree.update_batch(np.arange(len(leaves)), leaves)
        tree._on_write = on_write
        return tree

    def operate(self, start: int = 0, end: int = 0) -> float:
        """Apply the operation to leaves `start` to `end - 1`; an `end` of 0 or less counts from the last leaf."""
        end = end + self.capacity if end <= 0 else end
        if start == 0 and end == self.capacity:
            return float(self.tree[1])
        return float(self._combine.reduce(self.tree[self.capacity + start : self.capacity + end]))

    def __setitem__(self, idx: int, val: float) -> None:
        self.update_batch(np.array([idx]), np.array([val]))

    def __getitem__(self, idx: int) -> float:
        if not 0 <= idx < self.capacity:
            raise AssertionError(f"idx: expected 0 to {self.capacity - 1}, got {idx}.")
        return float(self.tree[self.capacity + idx])

    def get_batch(self, indices: Any) -> np.ndarray:
        """Return the leaves at `indices`."""
        return self.tree[self.capacity + np.asarray(indices, np.intp)]

    def update_batch(self, indices: Any, values: Any) -> None:
        """Set the leaves at `indices`, and the nodes above them."""
        nodes = self.capacity + np.asarray(indices, np.intp)
        if not nodes.size:
            return
        if self._on_write is not None:
            self._on_write(indices, values)
        self.tree[nodes] = values
        for _ in range(self.capacity.bit_length() - 1):
            nodes = np.unique(nodes >> 1)
            self.tree[nodes] = self._combine(self.tree[2 * nodes], self.tree[2 * nodes + 1])


class SumSegmentTree(SegmentTree, find_original_class("components.segment_tree", "SumSegmentTree")):
    """Sums of ranges; leaves are 0 at first."""

    def __init__(self, capacity: int) -> None:
        SegmentTree.__init__(self, capacity, operator.add, 0.0)

    def sum(self, start: int = 0, end: int = 0) -> float:
        """Return the sum of leaves `start` to `end - 1`, or of all from `start` on."""
        return self.operate(start, end)

    def retrieve(self, upperbound: float) -> int:
        """Return the first leaf at which the running sum exceeds `upperbound`."""
        if not 0 <= upperbound <= self.sum() + 1e-5:
            raise AssertionError(f"upperbound: {upperbound}")
        return int(self.retrieve_batch(np.array([upperbound]))[0])

    def retrieve_batch(self, upperbounds: Any) -> np.ndarray:
        """Return, for each of `upperbounds`, the first leaf at which the running sum exceeds it."""
        remaining = np.array(upperbounds, np.float64)
        node = np.ones(remaining.shape, np.intp)
        for _ in range(self.capacity.bit_length() - 1):
            node *= 2
            left = self.tree[node]
            right = left <= remaining
            remaining -= np.where(right, left, 0.0)
            node += right
        return node - self.capacity


class MinSegmentTree(SegmentTree, find_original_class("components.segment_tree", "MinSegmentTree")):
    """Minima of ranges; leaves are infinite at first."""

    def __init__(self, capacity: int) -> None:
        SegmentTree.__init__(self, capacity, min, float("inf"))

    def min(self, start: int = 0, end: int = 0) -> float:
        """Return the minimum of leaves `start` to `end - 1`, or of all from `start` on."""
        return self.operate(start, end)
