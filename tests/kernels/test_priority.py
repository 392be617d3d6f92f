"""Every priority tree draws like a list of priorities that is searched from the left.

The native tree, the tree in torch ops and Triton's under its interpreter run the same tests.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from relive import kernels
from relive.kernels import priority
from relive.kernels.priority import PriorityTree, importance_weights, make_priority_tree
from relive.rng import Randomness
from tests.conftest import BACKENDS, running
from tests.kernels.tree_histories import HUGE, TINY, History, check_history, histories
from tests.kernels.triton.interpreter import interpreted
from tests.reference.priority import SlowTree
from tests.tiers import select

CPU = torch.device("cpu")


SLOW_ON_TRITON = pytest.mark.parametrize("any_tree", select(*BACKENDS, of=[*BACKENDS, "triton"]), indirect=True)


@pytest.fixture(params=[*BACKENDS, "triton"])
def any_tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test on the trees of every backend."""
    if request.param != "triton":
        with running(request.param):
            yield
        return
    with interpreted():
        from relive.kernels.triton import priority_tree as triton_tree  # noqa: PLC0415 (needs Triton)

        # Under the interpreter the time of many draws depends on the number of programs.
        monkeypatch.setattr(triton_tree, "DRAW_BLOCK", 1024)
        yield


def is_triton() -> bool:
    return kernels.backend() == "triton"


def make_empty_tree(num_leaves: int) -> PriorityTree:
    if not is_triton():
        return make_priority_tree(num_leaves, CPU)
    from relive.kernels.triton.priority_tree import TritonTree  # noqa: PLC0415 (needs Triton)

    return TritonTree(num_leaves, CPU)


def make_random(seed: int) -> Randomness:
    if not is_triton():
        return Randomness(seed)
    from relive.kernels.triton.stream import DeviceStream  # noqa: PLC0415 (needs Triton)

    return DeviceStream(seed, CPU)


def doubles(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_tree(priorities: Any) -> PriorityTree:
    tree = make_empty_tree(len(priorities))
    tree.set(torch.arange(len(priorities)), doubles(priorities))
    return tree


def draw(tree: PriorityTree, count: int, seed: int | Randomness = 0) -> torch.Tensor:
    leaves = tree.draw(count, make_random(seed) if isinstance(seed, int) else seed)
    assert leaves is not None
    assert leaves.dtype == torch.int64
    assert leaves.shape == (count,)
    return leaves


def make_constant_randomness(uniform: float) -> Any:
    """Return randomness that always draws the same number."""
    function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)(lambda _: uniform)
    words = (ctypes.c_void_p * 5)(None, None, None, ctypes.cast(function, ctypes.c_void_p), None)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = ctypes.c_char_p(b"BitGenerator")
    source: Any = Randomness(0)
    source.capsule = new_capsule(ctypes.addressof(words), name, None)
    source.uniform = lambda count, _: torch.full((count,), uniform, dtype=torch.float64)
    source.kept_alive = (function, words, name)
    return source


def chi_squared(tree: PriorityTree, seed: int) -> tuple[float, int]:
    """Return χ² of many draws against the priorities, and its degrees of freedom."""
    source, count, batches = make_random(seed), *((1000, 20) if is_triton() else (32, 1250))
    counts = torch.cat([draw(tree, count, source) for _ in range(batches)]).bincount(minlength=tree.num_leaves)
    share = tree.leaves_view() / tree.leaves_view().amax()
    expected = share / share.sum() * counts.sum()
    drawable = expected > 0
    assert counts[~drawable].sum() == 0
    return float(((counts - expected)[drawable] ** 2 / expected[drawable]).sum()), int(drawable.sum()) - 1


def assert_fits(tree: PriorityTree, seed: int) -> None:
    statistic, freedom = chi_squared(tree, seed)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.usefixtures("any_tree")
class TestDrawing:
    def test_draws_follow_the_priorities_before_and_after_updates(self) -> None:
        generator = np.random.default_rng(0)
        tree = make_tree(generator.random(200))
        assert_fits(tree, seed=1)
        tree.set(torch.from_numpy(generator.permutation(200)[:50]), doubles(generator.random(50) * 4))
        assert_fits(tree, seed=2)
        tree.set(torch.arange(0, 200, 3), 0.0)
        assert_fits(tree, seed=3)

    def test_the_test_of_draws_notices_wrong_priorities(self) -> None:
        tree = make_tree([1.0] * 40)
        # The sums are not rebuilt, so they are wrong.
        tree.leaves_view()[20:] = 1.2
        statistic, freedom = chi_squared(tree, 1)
        assert statistic > freedom + 5 * math.sqrt(2 * freedom)

    @pytest.mark.parametrize("by_global_min", [False, True])
    def test_weights_come_with_the_leaves(self, by_global_min: bool) -> None:
        priorities = np.random.default_rng(1).random(400) * (np.arange(400) % 3 > 0)
        tree = make_tree(priorities)
        for beta in (0.0, 0.4, 1.0):
            result = tree.draw_weighted(70, make_random(4), beta, by_global_min)
            assert result is not None
            leaves, weights = result
            assert torch.equal(leaves, draw(tree, 70, seed=4))
            masses = tree.get(leaves)
            smallest = float(tree.smallest_priority()) if by_global_min else float(masses.min())
            assert torch.allclose(weights, importance_weights(masses, smallest, beta), rtol=1e-6, atol=0)
            assert by_global_min or float(weights.max()) == 1

    def test_weights_of_tiny_and_huge_priorities_are_positive(self) -> None:
        tree = make_tree([TINY, HUGE, HUGE, HUGE])
        for beta in (0.4, 1.0, 3.0):
            result = tree.draw_weighted(8, make_random(0), beta, by_global_min=True)
            assert result is not None
            assert torch.allclose(result[1], importance_weights(doubles([HUGE] * 8), TINY, beta), rtol=1e-6, atol=0)
            assert (result[1] > 0).all()

    def test_equal_seeds_give_equal_draws_and_other_seeds_other_draws(self) -> None:
        tree = make_tree(np.arange(1.0, 500.0))
        source = make_random(7)
        first, second = draw(tree, 32, source), draw(tree, 32, source)
        again = make_random(7)
        assert torch.equal(first, draw(tree, 32, again))
        assert torch.equal(second, draw(tree, 32, again))
        assert not torch.equal(first, second)
        assert not torch.equal(first, draw(tree, 32, seed=8))
        assert draw(tree, 0).tolist() == []

    @pytest.mark.parametrize("values", [(1e-320, 1e308), (0.1, 0.3, 0.7), (1e-300, TINY), (HUGE, 1.0)], ids=str)
    def test_zero_leaves_are_never_drawn(self, values: tuple[float, ...]) -> None:
        generator = np.random.default_rng(1)
        priorities = generator.choice((0.0, 0.0, *values), 3000)
        # With zeros at the end, rounding could select a leaf past the last positive one.
        priorities[-200:] = 0
        tree, source = make_tree(priorities), make_random(3)
        leaves = torch.cat([draw(tree, 1000, source) for _ in range(10 if is_triton() else 100)])
        assert (tree.get(leaves) > 0).all()


@pytest.mark.usefixtures("backend")
class TestOnTheHost:
    """Draws from exact points, refused leaves and an empty tree: the trees of other devices check nothing."""

    @pytest.mark.parametrize("num_leaves", [1, 2, 7, 8, 9, 63, 64, 65, 513, 4097])
    def test_draws_are_the_leaves_that_the_written_out_search_finds(self, num_leaves: int) -> None:
        # Sums of whole numbers are exact, so the leaf of each point is exact too.
        priorities = np.random.default_rng(num_leaves).integers(0, 5, num_leaves).astype(float)
        priorities[num_leaves // 2] = 3
        slow = SlowTree(num_leaves)
        slow.set(range(num_leaves), priorities.tolist())
        assert draw(make_tree(priorities), 64, seed=5).tolist() == slow.draw(Randomness(5).uniform(64, CPU).tolist())

    def test_draws_beyond_one_pass_continue_with_the_next_slice(self) -> None:
        assert (draw(make_tree([1.0] * 1000), 3000) == torch.arange(3000) // 3).all()

    def test_no_global_generator_is_touched(self) -> None:
        tree = make_tree([1.0, 2.0])
        before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
        draw(tree, 100)
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (str(np.random.get_state()), random.getstate())  # noqa: NPY002

    def test_a_tree_of_zeros_draws_nothing(self) -> None:
        tree = make_empty_tree(100)
        assert tree.draw(5, Randomness(0)) is None
        assert tree.draw_weighted(5, Randomness(0), 1.0, by_global_min=False) is None
        tree.set(torch.tensor([3]), TINY)
        assert draw(tree, 5).tolist() == [3] * 5
        tree.set(torch.tensor([3]), 0.0)
        assert tree.draw(5, Randomness(0)) is None

    @pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
    @pytest.mark.parametrize("value", [TINY, 1e-320, 0.1, 1.0, 1e300, HUGE])
    def test_points_on_a_border_fall_into_a_positive_leaf(self, uniform: float, value: float) -> None:
        source = make_constant_randomness(uniform)
        for num_leaves in (1, 9, 70, 600):
            for positive in ([0], [num_leaves - 1], [num_leaves // 2], range(0, num_leaves, 3)):
                tree = make_empty_tree(num_leaves)
                tree.set(torch.tensor(positive), value)
                for count in (1, 3, 64):
                    assert (tree.get(draw(tree, count, source)) > 0).all()

    @pytest.mark.parametrize("wrong", [-1, 100, 101, 2**40, -(2**63)])
    def test_a_leaf_outside_is_refused_and_nothing_changes(self, wrong: int) -> None:
        tree = make_tree([1.0] * 100)
        with pytest.raises(IndexError):
            tree.set(torch.tensor([3, wrong]), doubles([9.0, 9.0]))
        with pytest.raises(IndexError):
            tree.set(torch.tensor([3, wrong]), 9.0)
        with pytest.raises(IndexError):
            tree.get(torch.tensor([3, wrong]))
        assert tree.leaves_view().tolist() == [1.0] * 100
        assert float(tree.total_priority()) == 100
        assert tree.max_sum_error() == 0

    def test_leaves_changed_without_rebuild_never_lead_outside(self) -> None:
        tree = make_tree([1.0] * 1001)
        for value in (0.0, math.nan, math.inf, 1e308):
            tree.leaves_view().fill_(value)
            leaves = draw(tree, 1000)
            assert leaves.min() >= 0
            assert leaves.max() < 1001


@pytest.mark.usefixtures("any_tree")
class TestScale:
    """Priorities from the smallest denormal to the largest double."""

    @pytest.mark.parametrize("value", [HUGE, 1e308, 1e200, 1e-200, 1e-308, 1e-320, TINY])
    def test_equal_priorities_of_any_size_are_equally_likely(self, value: float) -> None:
        assert draw(make_tree([value] * 700), 700).tolist() == list(range(700))

    @pytest.mark.parametrize("value", [HUGE / 7, 1e-308, 7 * TINY])
    def test_ratios_are_kept_at_both_ends(self, value: float) -> None:
        assert_fits(make_tree([value * k for k in (1, 5, 0, 2, 3, 7) * 20]), seed=4)

    @SLOW_ON_TRITON
    def test_a_tree_switches_between_tiny_and_huge_priorities(self) -> None:
        tree = make_empty_tree(700)
        everything = torch.arange(700)
        for value in (1.0, HUGE, TINY, 1e-8, 1e-320, HUGE, 1.0, 0.0, 1e-310, 0.0, 1.0):
            tree.set(everything[:350], value)
            tree.set(everything[350:], value)
            assert tree.max_sum_error() <= 1e-15
            assert float(tree.smallest_priority()) == (value or math.inf)
            if value:
                assert draw(tree, 700).tolist() == everything.tolist()

    def test_huge_priorities_outweigh_tiny_ones(self) -> None:
        tree = make_tree([TINY] * 500 + [HUGE] + [TINY] * 500)
        assert (draw(tree, 1000) == 500).all()
        tree.set(torch.tensor([500]), 0.0)
        assert len(draw(tree, 1000).unique()) == 1000
        assert float(tree.total_priority()) == pytest.approx(1000 * TINY)

    def test_the_total_is_infinite_beyond_float64(self) -> None:
        tree = make_tree([1e308] * 3)
        assert float(tree.total_priority()) == math.inf
        tree.set(torch.tensor([0, 1]), 1.0)
        assert float(tree.total_priority()) == 1e308


@pytest.mark.usefixtures("any_tree")
class TestUpdating:
    def test_priorities_are_kept_exactly(self) -> None:
        values = doubles([0.1, 1 / 3, math.pi, TINY, HUGE, 0.0, 1e-8])
        assert torch.equal(make_tree(values.tolist()).get(torch.arange(7)), values)

    def test_one_number_sets_every_leaf(self) -> None:
        tree = make_empty_tree(100)
        tree.set(torch.tensor([4, 90, 4]), 2.5)
        assert tree.leaves_view().nonzero().flatten().tolist() == [4, 90]
        assert float(tree.total_priority()) == 5

    @pytest.mark.parametrize("count", [2, 50, 5000])
    def test_the_last_priority_of_a_repeated_leaf_counts(self, count: int) -> None:
        generator = np.random.default_rng(count)
        leaves, priorities = generator.integers(0, max(1, count // 4), count), generator.random(count)
        tree, slow = make_empty_tree(20_000), SlowTree(20_000)
        tree.set(torch.from_numpy(leaves), torch.from_numpy(priorities))
        slow.set(leaves.tolist(), priorities.tolist())
        assert tree.leaves_view().tolist() == slow.leaves
        assert float(tree.total_priority()) == pytest.approx(float(slow.total()), rel=1e-14)
        assert tree.max_sum_error() <= 1e-15

    def test_no_leaves_change_nothing(self) -> None:
        tree = make_tree([1.0, 2.0])
        nothing = torch.empty(0, dtype=torch.int64)
        tree.set(nothing, doubles([]))
        tree.set(nothing, 7.0)
        assert tree.get(nothing).tolist() == []
        assert float(tree.total_priority()) == 3

    def test_strided_arguments_are_read_right(self) -> None:
        tree = make_tree([1.0] * 20)
        tree.set(torch.arange(20)[::2], doubles(range(20))[::2])
        assert tree.get(torch.arange(20)[::4]).tolist() == [0, 4, 8, 12, 16]
        assert float(tree.total_priority()) == 10 + sum(range(0, 20, 2))

    @SLOW_ON_TRITON
    def test_many_updates_leave_no_drift(self) -> None:
        num_leaves, batch, batches = (1 << 13, 500, 40) if is_triton() else (1 << 17, 500, 2000)
        generator = np.random.default_rng(10)
        brute, tree = np.zeros(num_leaves), make_empty_tree(num_leaves)
        # After this call updates maintain the minima.
        tree.smallest_priority()
        for _ in range(batches):
            leaves = generator.integers(0, num_leaves, batch)
            priorities = 10 ** generator.uniform(-8, 8, batch)
            brute[leaves] = priorities
            tree.set(torch.from_numpy(leaves), torch.from_numpy(priorities))
        assert np.array_equal(tree.leaves_view().numpy(), brute)
        assert float(tree.total_priority()) == pytest.approx(math.fsum(brute), rel=1e-12)
        assert float(tree.smallest_priority()) == brute[brute > 0].min()
        assert tree.max_sum_error() <= 1e-12
        # Without the largest priority a sum of small ones remains, in which updates by differences would leave an
        # error.
        large = np.flatnonzero(brute > 1e-4)
        tree.set(torch.from_numpy(large), 0.0)
        brute[large] = 0
        assert float(tree.total_priority()) == pytest.approx(math.fsum(brute), rel=1e-9)

    def test_the_smallest_priority_follows_updates(self) -> None:
        tree = make_tree([3.0] * 100)
        for value, expected in ((3.0, 3.0), (1e-12, 1e-12), (5.0, 3.0)):
            tree.set(torch.tensor([70]), value)
            assert float(tree.smallest_priority()) == expected

    @pytest.mark.parametrize("num_leaves", [1, 8, 9, 700])
    def test_zeros_are_not_the_smallest_priority(self, num_leaves: int) -> None:
        tree = make_empty_tree(num_leaves)
        assert float(tree.total_priority()) == 0
        for value in (0.0, 0.25, -0.0):
            tree.set(torch.tensor([num_leaves - 1]), value)
            assert float(tree.smallest_priority()) == (value or math.inf)


@pytest.mark.usefixtures("any_tree")
class TestRestoring:
    def test_leaves_written_back_and_rebuilt_draw_the_same(self) -> None:
        generator = np.random.default_rng(2)
        tree = make_tree(generator.random(1000))
        tree.set(torch.from_numpy(generator.integers(0, 1000, 300)), doubles(generator.random(300)))
        other = make_empty_tree(1000)
        other.smallest_priority()
        other.leaves_view().copy_(tree.leaves_view())
        other.rebuild()
        assert other.max_sum_error() == 0
        assert float(other.total_priority()) == pytest.approx(float(tree.total_priority()), rel=1e-15)
        assert float(other.smallest_priority()) == float(tree.smallest_priority())
        assert torch.equal(draw(other, 500), draw(tree, 500))

    @pytest.mark.parametrize("value", [HUGE, TINY])
    def test_tiny_and_huge_leaves_are_rebuilt(self, value: float) -> None:
        tree = make_tree([1.0] * 100)
        tree.leaves_view().fill_(value)
        tree.rebuild()
        assert draw(tree, 100).tolist() == list(range(100))

    def test_the_check_sees_a_leaf_that_the_sums_do_not(self) -> None:
        tree = make_tree([1.0] * 1000)
        assert tree.max_sum_error() == 0
        tree.leaves_view()[700] = 2.0
        assert tree.max_sum_error() > 1e-3
        tree.rebuild()
        assert tree.max_sum_error() == 0


@SLOW_ON_TRITON
@pytest.mark.usefixtures("any_tree")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories(max_leaves=150, max_batches=6), st.integers(1, 40), st.booleans())
def test_any_history_agrees_with_priorities_on_a_line(history: History, count: int, keeps_smallest: bool) -> None:
    tree, error = make_empty_tree(history[0]), 0.0 if is_triton() else 1e-14
    check_history(tree, history, count, make_random(1), keeps_smallest=keeps_smallest, error=error)


class Operations(TorchDispatchMode):
    """Records the names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def make_device_tree(num_leaves: int) -> Any:
    """Return a torch tree that skips the checks of the CPU, as on a device where reading a result would synchronise."""
    with kernels.force_torch():
        tree: Any = make_priority_tree(num_leaves, CPU)
    tree._is_cpu = False
    return tree


def parallel_cumsum(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute running sums in log₂ n passes like a device: in each pass an entry adds one further to the left."""
    sums, step = values.movedim(dim, -1), 1
    while step < sums.shape[-1]:
        sums = torch.cat([sums[..., :step], sums[..., step:] + sums[..., :-step]], -1)
        step *= 2
    return sums.movedim(-1, dim)


class TestDevices:
    def test_repeated_leaves_are_written_with_the_last_priority(self) -> None:
        # On a device a scatter of two numbers to one leaf keeps either of them; on the CPU it keeps the last one by
        # chance.
        leaves, values = torch.tensor([5, 2, 5, 9, 2, 5]), doubles([1, 2, 3, 4, 5, 6])
        assert priority._take_last_value_per_leaf(leaves, values).tolist() == [6, 5, 6, 4, 5, 6]

    def test_parallel_sums_never_select_a_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        generator = np.random.default_rng(6)
        values = doubles(generator.random(20_000) * (generator.random(20_000) < 0.3))
        zero = values == 0
        # Rounding changes some running sums at a zero.
        assert (parallel_cumsum(values, 0).diff()[zero[1:]] != 0).any()
        monkeypatch.setattr(torch.Tensor, "cumsum", parallel_cumsum)
        running = priority._RunningSums(len(values), torch.tensor([[1.0], [1.0]], dtype=torch.float64))
        running.compute_from(values[:, None].expand(-1, 2))
        steps = running.ends.diff()
        assert (steps >= 0).all()
        assert (steps[zero[1:]] == 0).all()
        rows = values.view(-1, 50)
        # These points are on the borders of leaves, where rounding decides.
        for points in rows.cumsum(1).unbind(1):
            leaf = priority._find_where_sum_reaches(rows, points)
            assert (rows.gather(1, leaf[:, None]) > 0)[points > 0].all()

    def test_sampling_and_updating_take_few_operations_and_never_wait(self) -> None:
        tree, source = make_device_tree(100_000), Randomness(0)
        tree.set(torch.arange(100_000), 1.0)
        draw(tree, 64, source)
        with Operations() as operations:
            leaves, _ = tree.draw_weighted(64, source, 0.4, by_global_min=False)
            tree.set(leaves, torch.ones(64, dtype=torch.float64))
            sampling = len(operations.names)
            tree.set(leaves, 2.0)
            tree.total_priority()
            tree.smallest_priority()
            tree.rebuild()
        assert sampling <= 60
        waiting = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero", "aten::equal"}
        assert not waiting & set(operations.names)

    def test_draws_from_zeros_stay_inside(self) -> None:
        tree = make_device_tree(1001)
        leaves = draw(tree, 100)
        assert leaves.min() >= 0
        assert leaves.max() < 1001
