"""The priority tree in Triton agrees with the native tree, with a slow search, and with rings in torch ops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from relive.replay.ring import Ring
from relive.storage import LocalAllocator
from tests.kernels.tree_histories import TINY
from tests.kernels.triton.interpreter import in_every_order
from tests.tiers import select

pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")

import triton
import triton.language as tl

from relive.kernels.priority import NativeTree
from relive.kernels.triton import priority_tree
from relive.kernels.triton.priority_tree import TritonTree
from relive.kernels.triton.stream import DeviceStream

CPU = torch.device("cpu")


def doubles(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_tree(priorities: Any) -> TritonTree:
    tree = TritonTree(len(priorities), CPU)
    tree.set(torch.arange(len(priorities)), doubles(priorities))
    return tree


def stream(seed: int = 0) -> DeviceStream:
    return DeviceStream(seed, CPU)


class TestSums:
    @pytest.mark.parametrize(
        "num_leaves", select(1, 17, 300, 4097, of=[1, 2, 15, 16, 17, 255, 256, 257, 300, 4097, 70_000])
    )
    def test_every_node_has_the_running_sums_of_its_children(self, num_leaves: int) -> None:
        values = np.random.default_rng(num_leaves).random(num_leaves)
        tree = make_tree(values)
        assert tree.max_sum_error() == 0
        assert float(tree.total_priority()) == pytest.approx(values.sum(), rel=1e-13)
        assert float(tree.smallest_priority()) == values.min()
        assert tree.max_sum_error() == 0

    def test_the_check_sees_a_sum_a_leaf_and_a_minimum_that_are_wrong(self) -> None:
        tree = make_tree([1.0] * 300)
        tree.smallest_priority()
        for tensor, place in ((tree._sums[0], 40), (tree._sums[1], 50), (tree._leaves, 7), (tree._minima, 3)):
            before = float(tensor[place])
            tensor[place] = 0.5
            assert tree.max_sum_error() > 1e-3
            tensor[place] = before
            assert tree.max_sum_error() == 0

    def test_updates_leave_the_bits_that_a_rebuild_gives(self) -> None:
        # Equal bits make a resumed run draw the same rows.
        generator = np.random.default_rng(3)
        tree = make_tree(generator.random(1000))
        tree.smallest_priority()
        for _ in range(5):
            leaves = torch.from_numpy(generator.integers(0, 1000, 60))
            tree.set(leaves, torch.from_numpy(10 ** generator.uniform(-8, 8, 60)))
        sums, least = tree._sums.clone(), tree._minima.clone()
        tree.rebuild()
        assert torch.equal(sums, tree._sums)
        assert torch.equal(least, tree._minima)

    @pytest.mark.parametrize("count", select(40, of=[40, 513, 1500]))
    def test_the_last_priority_of_a_repeated_leaf_counts_as_in_the_native_core(self, count: int) -> None:
        generator = np.random.default_rng(count)
        leaves = torch.from_numpy(generator.integers(0, 30, count))
        values = torch.from_numpy(generator.random(count))
        tree, native = TritonTree(2000, CPU), NativeTree(2000, LocalAllocator(CPU))
        for order in (slice(None), slice(count // 2)):
            tree.set(leaves[order], values[order])
            native.set(leaves[order], values[order])
            assert torch.equal(tree.leaves_view(), native.leaves_view())
        assert tree._stamps.count_nonzero() == 0
        assert tree.max_sum_error() == 0

    def test_an_update_is_the_same_in_every_order_of_lanes(self) -> None:
        leaves, values = torch.tensor([5, 2, 5, 9, 2, 5]), doubles([1, 2, 3, 4, 5, 6])

        def run() -> Any:
            tree = TritonTree(40, CPU)
            tree.set(leaves, values)
            return tree.leaves_view(), tree._sums

        masses, _ = in_every_order(run, 3)
        assert masses[[2, 5, 9]].tolist() == [5, 6, 4]


@triton.jit
def _descend_kernel(sums, points, out, num_leaves: tl.int64, levels, root: tl.int64, BLOCK: tl.constexpr):  # pyright: ignore
    lane = tl.arange(0, BLOCK)
    leaf = priority_tree._find_leaf_at_point(sums, tl.load(points + lane), num_leaves, levels, root, BLOCK)
    tl.store(out + lane, leaf)


class TestDraws:
    def test_points_on_a_border_and_past_the_end_fall_into_a_positive_leaf(self) -> None:
        generator = np.random.default_rng(8)
        values = generator.random(300) * (generator.random(300) < 0.3)
        values[-40:] = 0
        tree = make_tree(values)
        sums = tree._sums[0]
        ends = torch.cat([sums[: 19 * 16], sums[-16:], doubles([0.0, 1.0, math.inf])])
        borders = torch.cat([ends, ends.nextafter(doubles(0.0)), ends.nextafter(doubles(1.0)), doubles([0.0] * 47)])
        leaves = torch.empty(1024, dtype=torch.int64)
        points = torch.nn.functional.pad(borders, (0, 1024 - len(borders)))
        launch: Any = _descend_kernel[(1,)]
        launch(sums, points, leaves, tree.num_leaves, tree._levels, len(sums) - 1, BLOCK=1024)
        assert (tree.get(leaves) > 0).all()

    def test_programs_in_any_order_draw_and_weigh_the_same(self) -> None:
        tree = make_tree(np.random.default_rng(0).random(500))
        for by_global_min in (False, True):

            def run(by_global_min: bool = by_global_min) -> Any:
                source = stream(4)
                first = tree.draw_weighted(100, source, 0.7, by_global_min)
                return first, tree.draw_weighted(50, source, 0.7, by_global_min), source.numbers

            (leaves, _), (others, _), numbers = in_every_order(run, 3)
            assert numbers[1:9].tolist() == [2, 2, 2, 2, 1, 1, 1, 0]
            assert leaves[:50].tolist() != others.tolist()

    def test_a_tree_of_zeros_draws_leaves_inside(self) -> None:
        leaves = TritonTree(1001, CPU).draw(40, stream())
        assert leaves.min() >= 0
        assert leaves.max() < 1001

    @pytest.mark.filterwarnings("ignore:All-NaN")
    def test_wrong_sums_never_lead_outside(self) -> None:
        tree = make_tree([1.0] * 101)
        for value in (0.0, math.nan, math.inf, 1e308):
            tree._sums.fill_(value)
            leaves = tree.draw(40, stream())
            assert leaves.min() >= 0
            assert leaves.max() < 101


class TestAccepting:
    def test_masses_largest_and_stale_are_those_of_the_native_core(self) -> None:
        generator = np.random.default_rng(2)
        leaves = torch.from_numpy(generator.integers(-1, 50, 80))
        for dtype in (torch.float32, torch.float64):
            priority = torch.from_numpy(10 ** generator.uniform(-6, 3, 80)).to(dtype)
            tree, native = TritonTree(50, CPU), NativeTree(50, LocalAllocator(CPU))
            stale = tree.set_priorities(leaves, priority, 0.6, 1e-6)
            # The first number is the largest priority so far.
            numbers = [1.0]
            bad, skipped = native.update_priorities(leaves, priority, 0.6, 1e-6, numbers)
            assert (bad, int(stale), float(tree.largest)) == (-1, skipped, numbers[0])
            assert torch.allclose(tree.leaves_view(), native.leaves_view(), rtol=1e-13, atol=0)
            assert tree.faults.tolist() == [0, 0, 0]

    @pytest.mark.parametrize("alpha", [0.0, 1.0])
    def test_an_exponent_of_zero_or_one_is_exact(self, alpha: float) -> None:
        tree = TritonTree(3, CPU)
        tree.set_priorities(torch.arange(3), doubles([0.0, 0.1, 1e300]), alpha, 0.0)
        assert tree.leaves_view().tolist() == [0.0, 0.1**alpha, 1e300**alpha]

    def test_positive_priorities_have_a_positive_mass(self) -> None:
        tree = TritonTree(2, CPU)
        tree.set_priorities(torch.arange(2), doubles([1e-300, 0.0]), 2.0, 0.0)
        assert tree.leaves_view().tolist() == [TINY, 0.0]

    def test_invalid_priorities_are_skipped_and_counted(self) -> None:
        tree = make_tree([1.0] * 6)
        priorities = doubles([math.nan, -1.0, math.inf, 1e300, 2.0, math.nan, 3.0])
        stale = tree.set_priorities(torch.tensor([0, 1, 2, 3, 4, 4, -1]), priorities, 2.0, 0.0)
        # The last priority of leaf 4 is invalid, so the preceding one counts; 1e300 squared is invalid too.
        assert tree.leaves_view().tolist() == [1, 1, 1, 1, 4, 1]
        assert int(stale) == 1
        assert tree.faults.tolist() == [5, 0, 0]
        assert float(tree.largest) == 2.0
        assert tree.max_sum_error() == 0
        tree.set_priorities(torch.tensor([99, 0]), doubles([1.0, math.nan]), 1.0, 0.0)
        assert tree.faults.tolist() == [6, 1, 0]

    def test_rows_are_found_by_their_ids_as_the_ring_finds_them(self) -> None:
        ring = Ring.allocate(15, 3, 2, LocalAllocator(CPU))
        generator = np.random.default_rng(0)
        ring.head.copy_(torch.tensor([0, 14, 23]))
        ring.open.copy_(torch.tensor([False, True, True]))
        ring.kind.copy_(torch.from_numpy(generator.choice(5, (17, 3), p=[0.1, 0.5, 0.2, 0.1, 0.1])))
        ids = torch.arange(-4, 80)
        slots, never = ring.locate(ids)
        assert (slots >= 0).sum() >= 8
        assert never.sum() >= 8
        assert ((slots < 0) & ~never).sum() >= 8
        tree = TritonTree(52, CPU)
        stale = tree.set_priorities(ids, doubles(range(1, 85)), 1.0, 0.0, ring)
        expected = TritonTree(52, CPU)
        expected.set(slots[slots >= 0], doubles(range(1, 85))[slots >= 0])
        assert tree.leaves_view().tolist() == expected.leaves_view().tolist()
        assert int(stale) == int((slots < 0).sum())
        # An id of -1 is no fault.
        never[ids == -1] = False
        assert tree.faults.tolist() == [0, int(never.sum()), 0]

    def test_a_write_sets_new_rows_to_the_largest_mass_and_lost_rows_to_zero(self) -> None:
        tree = make_tree([2.0] * 20)
        tree.largest.fill_(9.0)
        kind = torch.tensor([0, 1, 2, 3, 4] * 4, dtype=torch.uint8)
        slots, is_changed = torch.tensor([1, 2, 6, 0, 6, 5]), torch.tensor([True, True, True, True, True, False])
        tree.set_written_slots(slots, is_changed, kind, 1.0, 0.5)
        assert tree.leaves_view().tolist() == [0.0, 9.5, 0.0, 2.0, 2.0, 2.0, 9.5, *[2.0] * 13]
        assert tree.max_sum_error() == 0
