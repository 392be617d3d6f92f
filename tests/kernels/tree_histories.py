"""Random updates of a priority tree, compared with a list of priorities that is searched from the left."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from tests.reference.priority import SlowTree

HUGE, TINY = 1.7e308, 5e-324

History = tuple[int, list[list[tuple[int, float]]]]
"""Number of leaves, and batches of updates."""

_magnitudes = st.floats(-323.3, 308.2).map(lambda exponent: float(f"1e{int(exponent)}") * (1 + abs(exponent) % 0.7))
_priorities = st.one_of(st.just(0.0), st.sampled_from([TINY, HUGE, 1.0]), st.floats(1e-3, 1e3), _magnitudes)


@st.composite
def histories(draw_from: st.DrawFn, *, max_leaves: int, max_batches: int) -> History:
    num_leaves = draw_from(st.integers(1, max_leaves))
    update = st.tuples(st.integers(0, num_leaves - 1), _priorities)
    return num_leaves, draw_from(st.lists(st.lists(update, max_size=40), min_size=1, max_size=max_batches))


def check_history(tree: Any, history: History, count: int, source: Any, *, keeps_smallest: bool, error: float) -> None:
    """Check after every batch of updates that the tree has the sums of a `SlowTree` and draws the same leaves."""
    num_leaves, batches = history
    slow = SlowTree(num_leaves)
    for batch in batches:
        leaves, values = [leaf for leaf, _ in batch], [value for _, value in batch]
        tree.set(torch.tensor(leaves, dtype=torch.int64), torch.tensor(values, dtype=torch.float64))
        slow.set(leaves, values)
        assert tree.leaves_view().tolist() == slow.leaves
        total = slow.total()
        expected = float(total) if total < 2**1024 else math.inf
        assert float(tree.total_priority()) == pytest.approx(expected, rel=1e-13, abs=2 * TINY)
        if keeps_smallest:
            assert float(tree.smallest_priority()) == slow.smallest()
        assert tree.max_sum_error() <= error
        if total:
            assert slow.may_draw(tree.draw(count, source).tolist(), Fraction(1, 10**14))
