"""H, I1: extreme numbers: priorities of any size, and counters near 2³¹, 2³², 2⁵³ and 2⁶³.

The tree of priorities alone (draws at borders, zero leaves, every history, a million updates) is tested in
`tests/kernels/test_priority.py`; the formulas of weights and the refusals of priorities in `tests/conformance`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.kernels.priority import PriorityTree, make_priority_tree
from tests.faults.digest import digest
from tests.tiers import select
from tests.totals import tell

CPU = torch.device("cpu")


# Priorities


def drift(tree: PriorityTree, updates: int) -> float:
    """Return the largest relative error of the total against `math.fsum`, with all leaves and with small ones only."""
    generator = np.random.default_rng(11)
    batch, brute = (
        500,
        np.zeros(tree.num_leaves),
    )  # few leaves: the tree updates sums instead of recomputing all of them
    for _ in range(updates // batch):
        leaves = generator.integers(0, tree.num_leaves, batch)
        priorities = 10 ** generator.uniform(-8, 8, batch)
        brute[leaves] = priorities
        tree.set(torch.from_numpy(leaves), torch.from_numpy(priorities))
    errors = [abs(float(tree.total_priority()) / math.fsum(brute) - 1)]
    large = np.flatnonzero(brute > 1e-4)
    tree.set(torch.from_numpy(large), torch.zeros(len(large), dtype=torch.float64))
    brute[large] = 0
    return max(*errors, abs(float(tree.total_priority()) / math.fsum(brute) - 1))


@pytest.mark.promise("H")
@pytest.mark.parametrize("updates", [10**6, pytest.param(10**7, marks=pytest.mark.long)])
def test_the_tree_does_not_drift(backend: str, updates: int) -> None:
    worst = drift(make_priority_tree(1 << 17, CPU), updates)
    tell(f"H: {updates} updates of the tree ({backend}), relative error {worst:.1e}")
    assert worst <= 1e-9


EXTREMES = {
    "denormal": [1e-320, 2e-320, 5e-324],
    "small": [1e-300, 1e-308, 1e-290],
    "everything": [1e-320, 1e-100, 1.0, 1e100, 1e308],
    "large": [1e308, 1e307, 1.7e308],
    "equal": [1e308] * 4,
    "with zeros": [0.0, 1e-320, 0.0, 1e308, 0.0],
}


def prioritized(priorities: list[float], **options: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(len(priorities), obs=1, action=(), sampler=rl.Prioritized(**options), seed=0)
    for t in range(len(priorities)):
        replay.add([float(t)], 0.0, float(t), False, False, [t + 1.0])
    replay.update_priority(torch.arange(len(priorities)), torch.tensor(priorities, dtype=torch.float64))
    return replay


def check_weights(batch: Any, priorities: list[float], normalize: str, power: float) -> None:
    """Return the weights (smallest / priority)^power of the rows with positive priority."""
    drawn, weight = np.array(priorities)[batch["index"].numpy()], batch["weight"].numpy()
    assert (drawn > 0).all()
    assert weight.dtype == np.float32
    assert ((weight > 0) & (weight <= 1)).all()
    smallest = drawn.min() if normalize == "batch" else min(p for p in priorities if p > 0)
    assert (weight[drawn == smallest] == 1).all()
    assert weight.max() == 1 or normalize == "global"
    expected = np.exp(power * (np.log(smallest) - np.log(drawn)))
    assert weight == pytest.approx(np.maximum(expected, np.finfo(np.float32).tiny), rel=1e-4)


@pytest.mark.promise("H")
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("normalize", ["batch", "global"])
@pytest.mark.parametrize("priorities", EXTREMES.values(), ids=EXTREMES)
def test_weights_of_any_priorities_are_in_their_range(
    backend: str, priorities: list[float], normalize: Any, alpha: float, beta: float
) -> None:
    replay = prioritized(priorities, eps=0.0, alpha=alpha, beta=beta, normalize=normalize)
    check_weights(replay.sample(400), priorities, normalize, alpha * beta)


def test_a_new_row_takes_the_largest_priority_of_all(backend: str) -> None:
    replay = prioritized([1e308, 1.0], eps=0.0, alpha=1.0)
    replay.add([2.0], 0.0, 2.0, False, False, [3.0])  # replaces the row with 1e308
    assert set(replay.sample(500)["index"].tolist()) == {2}


def test_rows_of_priority_zero_come_back_with_any_other(backend: str) -> None:
    replay = prioritized([0.0] * 9, eps=0.0)
    with pytest.raises(rl.NotReadyError):
        replay.sample(1)
    replay.update_priority([4], [5e-324])
    assert set(replay.sample(100)["index"].tolist()) == {4}


# Counters

ENVS, ROWS = 3, 8
BORDERS = [2**31, 2**32, 2**53]


def play(replay: rl.ReplayBuffer) -> Iterator[None]:
    """Add episodes with ends and cuts, in blocks and by single environments."""
    random = np.random.default_rng(5)
    now = 0.0
    for t in range(60):
        count = 2 if t % 7 == 3 else ENVS
        ends = random.random(count) < 0.1
        step = {
            "obs": np.full((count, 1), now),
            "action": np.full(count, t),
            "reward": np.arange(count) + 10.0 * t,
            "terminated": ends,
            "truncated": np.zeros(count, bool),
            "next_obs": np.full((count, 1), now + 1),
        }
        now += 1
        if t % 5 == 4 and count == ENVS:
            replay.extend({name: value[None] for name, value in step.items()})
        else:
            replay.add(**step, env_ids=[2, 0] if count == 2 else None)
        if t % 13 == 12:
            replay.cut([1])
        if t == 40:
            replay.clear()
        yield


def begin_at(replay: rl.ReplayBuffer, row: int) -> None:
    """Make an empty buffer number its rows from `row` on."""
    ring = replay.storage.rows.ring
    ring.head.fill_(row)
    ring.floor.fill_(row)
    replay.storage.rebuild_caches()


def make(**options: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(ENVS * ROWS, obs=1, action=(), num_envs=ENVS, sampler=rl.Prioritized(), seed=3, **options)


def assert_twins(replay: rl.ReplayBuffer, twin: rl.ReplayBuffer, shift: int) -> None:
    """Assert that two buffers hold and sample the same rows, one with ids larger by `shift`."""
    ids = twin.ids()
    assert (replay.ids() - shift).tolist() == ids.tolist()
    mine, theirs = replay[ids + shift], twin[ids]
    for view in (None, rl.NStep(3, 0.9), rl.Sequence(3, burn_in=2)):
        drawn, expected = replay.sample(16, view), twin.sample(16, view)
        assert_equal_batches(drawn, expected, shift)
        priority = torch.linspace(0, 1, 16)
        stale = torch.cat([expected["index"], torch.tensor([0, 1])])[2:]
        assert replay.update_priority(stale + shift, priority) == twin.update_priority(stale, priority)
    assert_equal_batches(mine, theirs, shift)
    for a, b in zip(replay.episodes(), twin.episodes(), strict=True):
        assert_equal_batches(a, b, shift)
    for never in (int(replay.storage.rows.ring.head.max()) * ENVS + ENVS, shift - 1 if not shift else -1):
        with pytest.raises(IndexError):
            replay[[never]]


def live_together(replay: rl.ReplayBuffer, twin: rl.ReplayBuffer, shift: int) -> Iterator[None]:
    """Give two buffers the same calls and compare them after each."""
    for _ in zip(play(replay), play(twin), strict=True):
        if len(twin):
            assert_twins(replay, twin, shift)
        yield


def assert_equal_batches(mine: Any, theirs: Any, shift: int) -> None:
    assert set(mine.keys()) == set(theirs.keys())
    for name in mine.keys():
        expected = theirs[name] + shift if name == "index" else theirs[name]
        assert torch.equal(mine[name], expected), name


def first_row(border: int, unit: int, slots: int) -> int:
    """Return a row shortly before its number, or its number times `unit`, reaches `border`; it is in the first slot."""
    return (border // unit // slots - 2) * slots


@pytest.mark.promise("I1")
@pytest.mark.parametrize("unit", select(ENVS, of=[1, ENVS]), ids=["rows", "ids"])
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.filterwarnings("ignore::relive.DataWarning")  # `play` numbers observations across episode ends
def test_a_replay_buffer_passes_integer_borders_unchanged(backend: str, border: int, unit: int) -> None:
    replay, twin = make(), make()
    start = first_row(border, unit, replay.storage.rows.ring.slots)
    begin_at(replay, start)
    list(live_together(replay, twin, start * ENVS))
    assert int(replay.ids().max()) // ENVS * unit > border


@pytest.mark.filterwarnings("ignore::relive.DataWarning")  # `play` numbers observations across episode ends
def test_a_replay_buffer_ends_before_its_ids_do(backend: str) -> None:
    replay, twin = make(), make()
    start = first_row(2**63, ENVS, replay.storage.rows.ring.slots)
    begin_at(replay, start)
    steps = live_together(replay, twin, start * ENVS)
    with pytest.raises(OverflowError, match="add: expected ids below 2\\^63, got room for . rows per environment"):
        list(steps)
    assert 0 < 2**63 - 1 - int(replay.ids().max()) < 30
    before = digest(replay)
    with pytest.raises(OverflowError):
        replay.extend(
            {name: torch.zeros(1, ENVS) for name in ("action", "reward")}
            | {name: torch.zeros(1, ENVS, 1) for name in ("obs", "next_obs")}
            | {name: torch.zeros(1, ENVS, dtype=torch.bool) for name in ("terminated", "truncated")}
        )
    assert digest(replay) == before
    assert (replay.sample(50)["index"] >= start * ENVS).all()


def distillation(row: int) -> rl.DistillationBuffer:
    buffer = rl.DistillationBuffer(8, obs=1, action=(), seed=2)
    buffer._ring.head = buffer._ring.floor = row
    buffer._set_rounds([row])
    return buffer


@pytest.mark.promise("I1")
@pytest.mark.parametrize("border", BORDERS)
def test_a_distillation_buffer_passes_integer_borders_unchanged(backend: str, border: int) -> None:
    start = border - 16
    buffer, twin = distillation(start), distillation(0)
    for t in range(30):
        for one in (buffer, twin):
            one.add(np.full((3, 1), t), np.full(3, t))
            if t % 4 == 3:
                one.next_round()
                one.add([[-1.0]], [t])
        for read in (
            lambda one: [one.sample(12)],
            lambda one: [one.sample(12, recent={1: 0.5})],
            lambda one: one.epochs(3),
            lambda one: one.epochs(3, recent=2),
        ):
            for mine, theirs in zip(read(buffer), read(twin), strict=True):
                assert_equal_batches(mine, theirs, start)
        newest = 3 * (t + 1) + (t + 1) // 4 - 1
        assert_equal_batches(buffer[[newest + start]], twin[[newest]], start)
        for wrong in (newest + 1 + start, start - 1):
            with pytest.raises(IndexError):
                buffer[[wrong]]


def test_a_distillation_buffer_ends_before_its_ids_do(backend: str) -> None:
    buffer = distillation(2**63 - 10)
    buffer.add(np.zeros((7, 1)), np.zeros(7))
    before = digest(buffer)
    with pytest.raises(OverflowError, match="add: expected ids below 2\\^63"):
        buffer.add(np.zeros((3, 1)), np.zeros(3))
    assert digest(buffer) == before
    buffer.add(np.ones((2, 1)), np.ones(2))
    buffer.next_round()
    rows = torch.cat([batch["index"] for batch in buffer.epochs(4)])
    assert sorted(rows.tolist()) == list(range(2**63 - 9, 2**63 - 1))
    assert (buffer.sample(100)["index"] >= 2**63 - 9).all()


@pytest.mark.parametrize("border", [2**31, 2**32, 2**53 - 100])
def test_statistics_count_exactly_beyond_a_border(border: int) -> None:
    stats = rl.EpisodeStats(2, window=5)
    saved = stats.snapshot()
    saved["counts"] = torch.tensor([border - 10, border - 5])
    stats.restore(saved)
    for _ in range(20):
        stats.update([1.0, 2.0], [True, True], [False, False])
    assert (stats.num_episodes, stats.num_steps) == (border + 30, border + 35)
    assert stats.episodes()["step"].tolist() == [border + 31, border + 33, border + 33, border + 35, border + 35]
    assert stats.summary()["episodes"] == border + 30


def test_statistics_end_where_their_numbers_would_not_be_exact() -> None:
    stats = rl.EpisodeStats(2)
    saved = stats.snapshot()
    saved["counts"] = torch.tensor([0, 2**53 - 3])
    stats.restore(saved)
    stats.update([1.0, 2.0], [True, True], [False, False])
    assert stats.num_steps == 2**53 - 1
    before = digest(stats)
    with pytest.raises(OverflowError, match="update: expected at most 2\\^53 steps"):
        stats.update([1.0, 2.0], [True, True], [False, False])
    assert digest(stats) == before


@pytest.mark.parametrize("border", [2**31, 2**32])
def test_a_norm_counts_exactly_beyond_a_border(border: int) -> None:
    norm = make_norm(border - 1)
    norm.update([2.0, 2.0, 2.0])
    assert norm.count == border + 2


def test_a_norm_ends_where_its_count_would_not_be_exact() -> None:
    norm = make_norm(2**53 - 3)
    norm.update([1.0, 1.0])
    assert norm.count == 2**53 - 1
    before = digest(norm)
    for more in ([1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(OverflowError, match="update: expected fewer than 2\\^53 rows"):
            norm.update(more)
    assert digest(norm) == before


def make_norm(rows: int) -> rl.RunningNorm:
    norm = rl.RunningNorm(())
    norm.restore(norm.snapshot() | {"count": torch.tensor(float(rows), dtype=torch.float64)})
    return norm
