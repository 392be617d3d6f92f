"""Replay cases that buffers get wrong, with the numbers of `relive conformance`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from tests.conformance.test_on_policy import valid_rows
from tests.layouts import Both, World, arrays, read
from tests.reference.sequences import around
from tests.scripted import Script, act, step_and_reset, transitions, vector
from tests.tiers import select

pytestmark = pytest.mark.thorough

MODES = list(AutoresetMode)
seeds = st.integers(0, 2**32 - 1)


def read_rows(replay: rl.ReplayBuffer, ids: list[int]) -> list[tuple[float, ...]]:
    batch = replay[torch.tensor(ids, dtype=torch.int64)]
    names = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
    return list(zip(*(batch[name].flatten().tolist() for name in names), strict=True))


def assert_equal(both: Both) -> None:
    expected = both.expected
    assert len(both.replay) == len(expected)
    ids = sorted(expected)
    if ids:
        wanted = [
            tuple(expected[i][k] for k in ("obs", "action", "reward", "terminated", "truncated", "next_obs"))
            for i in ids
        ]
        assert read_rows(both.replay, ids) == wanted
        batch = both.replay.sample(4 * len(ids) + 8)
        assert set(batch["index"].tolist()) <= set(ids)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_t3_every_autoreset_mode_stores_the_transitions_of_the_bare_environment(mode: AutoresetMode, data: Any) -> None:
    ends = st.sampled_from(["terminated", "truncated", "both"])
    script = st.lists(st.tuples(st.integers(1, 5), ends), min_size=1, max_size=3).map(tuple)
    scripts: list[Script] = data.draw(st.lists(script, min_size=1, max_size=3))
    steps = data.draw(st.integers(1, 12))
    envs = vector(scripts, mode)
    replay = rl.ReplayBuffer.for_env(envs, 200 * len(scripts))
    obs, _ = envs.reset()
    for _ in range(steps):
        action = act(obs)
        step, next_obs = step_and_reset(envs, action)
        replay.add_step(obs, action, step)
        replay.check()
        obs = next_obs
    found: dict[int, list[Any]] = {env: [] for env in range(len(scripts))}
    for episode in replay.episodes():
        found[int(episode["obs"][0, 0])].extend(episode)
    for env, rows in found.items():
        for row, expected in zip(rows, transitions(env, scripts[env], len(rows)), strict=True):
            assert tuple(row["obs"].tolist()) == expected.obs
            assert tuple(row["next_obs"].tolist()) == expected.next_obs
            assert (int(row["action"]), float(row["reward"])) == (expected.action, expected.reward)
            assert (bool(row["terminated"]), bool(row["truncated"])) == (expected.terminated, expected.truncated)
    assert len(replay) == sum(valid_rows(script, steps, mode) for script in scripts)


@pytest.mark.parametrize("pushed", [9, 10, 11, 21])
@pytest.mark.parametrize("at_once", [False, True])
def test_t4_rows_stay_together_around_the_ring(backend: str, pushed: int, at_once: bool) -> None:
    replay = rl.ReplayBuffer(10, obs=2, action=1)
    t = np.arange(pushed, dtype=np.float32)
    block = {
        "obs": np.stack([t, -t], 1),
        "action": t[:, None] * 2,
        "reward": t * 3,
        "terminated": np.zeros(pushed, bool),
        "truncated": np.zeros(pushed, bool),
        "next_obs": np.stack([t + 1, -t - 1], 1),
    }
    if at_once:
        replay.extend(block)
    else:
        for i in range(pushed):
            replay.add(**{name: values[i] for name, values in block.items()})
    assert len(replay) == min(10, pushed)
    (episode,) = replay.episodes()
    stored = torch.arange(max(0, pushed - 10), pushed).float()
    assert torch.equal(episode["index"].float(), stored)
    assert torch.equal(episode["obs"], torch.stack([stored, -stored], 1))
    assert torch.equal(episode["next_obs"], torch.stack([stored + 1, -stored - 1], 1))
    assert torch.equal(episode["action"][:, 0], 2 * stored)
    assert torch.equal(episode["reward"], 3 * stored)


@pytest.mark.parametrize("next_step", [False, True])
@settings(max_examples=60, deadline=None)
@given(seed=seeds, rows=st.integers(1, 9), num_envs=st.integers(1, 4), length=st.integers(1, 25))
def test_t4_t25_any_history_equals_a_list_of_dicts(
    next_step: bool, seed: int, rows: int, num_envs: int, length: int
) -> None:
    both = Both(rows, num_envs, np.random.default_rng(seed), next_step=next_step)
    both.play(length)
    assert_equal(both)


@settings(max_examples=15, deadline=None)
@given(seed=seeds, rows=st.integers(1, 6), num_envs=st.integers(1, 3), next_step=st.booleans())
def test_t4_torch_operations_hold_the_same_rows(seed: int, rows: int, num_envs: int, next_step: bool) -> None:
    with rl.kernels.force_torch():
        both = Both(rows, num_envs, np.random.default_rng(seed), next_step=next_step)
        both.play(12)
        assert_equal(both)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@settings(max_examples=25, deadline=None)
@given(seed=seeds, rows=st.integers(1, 12), num_envs=st.integers(1, 3), next_step=st.booleans(), native=st.booleans())
def test_t5_t6_n_steps_stop_at_ends_and_at_the_newest_row_with_the_right_discount(
    n: int, seed: int, rows: int, num_envs: int, next_step: bool, native: bool
) -> None:
    both = Both(rows, num_envs, np.random.default_rng(seed), next_step=next_step)
    both.play(14)
    ids = sorted(both.expected)
    if not ids:
        return
    with rl.kernels.force_torch() if not native else pytest.MonkeyPatch.context():
        batch = read(both.replay, ids, rl.NStep(n, 0.9))
    for i, row in enumerate(ids):
        run = both.columns[row % num_envs].run(row // num_envs, n)
        reward = sum(0.9**k * step["reward"] for k, step in enumerate(run))
        assert float(batch[("reward",)][i]) == pytest.approx(reward, rel=1e-5)
        assert float(batch[("discount",)][i]) == pytest.approx(0.9 ** len(run))
        assert float(batch[("next_obs",)][i]) == run[-1]["next_obs"]
        assert bool(batch[("terminated",)][i]) == run[-1]["terminated"]
        assert bool(batch[("truncated",)][i]) == run[-1]["truncated"]
        assert float(batch[("obs",)][i]) == run[0]["obs"]
        assert float(batch[("action",)][i]) == run[0]["action"]


@pytest.mark.thorough
def test_t7_shared_next_observations_are_the_stored_ones_over_ten_thousand_layouts() -> None:
    random = np.random.default_rng(7)
    for _ in range(10_000):
        rows, num_envs = int(random.integers(1, 7)), int(random.integers(1, 3))
        world = World(random, num_envs, next_step=False)
        shared = rl.ReplayBuffer(rows * num_envs, obs=1, action=(), num_envs=num_envs)
        stored = rl.ReplayBuffer(2 * rows * num_envs, obs=1, action=(), num_envs=num_envs, next_obs="stored")
        for _ in range(int(random.integers(1, 2 * rows + 2))):
            step = arrays([world.step(env) for env in range(num_envs)])
            shared.add(**step)
            stored.add(**step)
        # Each reward is unique: it identifies its row.
        known = dict(zip(*(stored.sample(1).get(k).tolist() for k in ("reward", "index")), strict=True))
        slots = (stored.storage.rows.ring.kind.view(-1) == 1).nonzero().squeeze(1)
        everything = stored[stored.storage.ids(slots)]
        known = {
            r: (o, n)
            for r, o, n in zip(*(everything[k].flatten().tolist() for k in ("reward", "obs", "next_obs")), strict=True)
        }
        slots = (shared.storage.rows.ring.kind.view(-1) == 1).nonzero().squeeze(1)
        mine = shared[shared.storage.ids(slots)]
        for r, o, n in zip(*(mine[k].flatten().tolist() for k in ("reward", "obs", "next_obs")), strict=True):
            assert known[r] == (o, n)


def prioritized(priorities: list[float], **options: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(len(priorities), obs=1, action=(), sampler=rl.Prioritized(**options), seed=0)
    for i in range(len(priorities)):
        replay.add([float(i)], 0.0, float(i), False, False, [i + 1.0])
    assert replay.update_priority(torch.arange(len(priorities)), torch.tensor(priorities, dtype=torch.float64)) == 0
    return replay


class TestT8Weights:
    def weights(self, replay: rl.ReplayBuffer) -> dict[int, float]:
        batch = replay.sample(2000)
        return dict(zip(batch["index"].tolist(), batch["weight"].tolist(), strict=True))

    def test_weights_do_not_depend_on_the_scale_of_priorities(self, backend: str) -> None:
        small = self.weights(prioritized([1.0, 2.0, 4.0], eps=0.0))
        large = self.weights(prioritized([1e6, 2e6, 4e6], eps=0.0))
        assert small.keys() == large.keys() == {0, 1, 2}
        assert all(small[i] == pytest.approx(large[i], rel=1e-6) for i in small)

    def test_weights_are_one_for_equal_priorities(self, backend: str) -> None:
        assert set(self.weights(prioritized([0.3] * 5)).values()) == {1.0}

    def test_weights_follow_the_formula_with_alpha_once(self, backend: str) -> None:
        found = self.weights(prioritized([1.0, 2.0, 4.0], alpha=0.5, beta=0.7, eps=0.0))
        mass = np.array([1.0, 2.0, 4.0]) ** 0.5
        expected = (3 * mass / mass.sum()) ** -0.7
        expected /= expected.max()
        assert [found[i] for i in range(3)] == pytest.approx(expected.tolist(), rel=1e-6)

    def test_a_global_minimum_recovers_when_a_tiny_priority_is_overwritten(self, backend: str) -> None:
        replay = prioritized([1e-9, 1.0, 1.0], eps=0.0, normalize="global", alpha=1.0, beta=1.0)
        assert max(self.weights(replay).values()) < 1e-6 or 0 in self.weights(replay)
        replay.update_priority(torch.tensor([0]), torch.tensor([1.0]))
        assert set(self.weights(replay).values()) == {1.0}

    def test_beta_may_be_a_function_of_the_draws(self) -> None:
        seen: list[int] = []
        replay = prioritized([1.0, 3.0], beta=lambda draws: seen.append(draws) or 1.0)  # type: ignore[func-returns-value]
        replay.sample(8)
        replay.sample(8)
        assert seen == [0, 8]


class TestT9Priorities:
    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), -1.0, -1e-300])
    def test_invalid_priorities_are_refused_and_nothing_changes(self, backend: str, wrong: float) -> None:
        replay = prioritized([1.0, 2.0, 3.0])
        before = replay.sampler.tree.leaves_view().clone()  # type: ignore[attr-defined]
        with pytest.raises(rl.PriorityError, match=r"priority\[1\]: expected a finite number of at least 0"):
            replay.update_priority(torch.tensor([0, 1]), torch.tensor([9.0, wrong], dtype=torch.float64))
        assert torch.equal(before, replay.sampler.tree.leaves_view())  # type: ignore[attr-defined]

    def test_priorities_whose_power_overflows_are_refused_and_nothing_changes(self, backend: str) -> None:
        replay = prioritized([1.0, 2.0], alpha=2.0)
        with pytest.raises(rl.PriorityError, match=r"priority\[0\]: .* finite to the power of alpha"):
            replay.update_priority([1], np.array([1e300]))
        assert float(replay.sampler.tree.total_priority()) == pytest.approx(5.0, rel=1e-5)  # type: ignore[attr-defined]

    def test_extreme_priorities_are_drawn_with_valid_weights(self, backend: str) -> None:
        replay = prioritized([1e-320, 1e-200, 1.0, 1e200, 1e308], eps=0.0, alpha=1.0, beta=1.0, normalize="global")
        batch = replay.sample(1000)
        assert ((batch["weight"] > 0) & (batch["weight"] <= 1)).all()
        assert set(batch["index"].tolist()) == {4}

    def test_rows_of_priority_zero_are_never_drawn(self, backend: str) -> None:
        replay = prioritized([0.0, 1.0, 0.0, 1e-12], eps=0.0, alpha=1.0)
        assert set(replay.sample(20_000)["index"].tolist()) <= {1, 3}

    def test_priorities_that_are_all_zero_are_an_error(self, backend: str) -> None:
        replay = prioritized([0.0, 0.0], eps=0.0)
        with pytest.raises(rl.NotReadyError, match="sample: expected a row of positive priority, got only zeros"):
            replay.sample(1)


def test_t10_the_tree_is_exact_after_a_million_updates() -> None:
    replay = prioritized([1.0] * 4096, eps=0.0, alpha=1.0)
    random = np.random.default_rng(0)
    model = np.ones(4096)
    for _ in range(1000):
        index = random.integers(0, 4096, 1000)
        priority = 10 ** random.uniform(-8, 8, 1000)
        replay.update_priority(index, priority)
        model[index] = priority
    tree = replay.sampler.tree  # type: ignore[attr-defined]
    assert tree.leaves_view()[:4096].numpy() == pytest.approx(model, rel=0)
    assert float(tree.total_priority()) == pytest.approx(model.sum(), rel=1e-12)
    assert tree.max_sum_error() < 1e-9


def test_t11_the_last_of_duplicate_indices_counts(backend: str) -> None:
    replay = prioritized([1.0, 1.0], eps=0.0, alpha=1.0)
    replay.update_priority(torch.tensor([0, 1, 0]), torch.tensor([5.0, 1.0, 0.0]))
    assert set(replay.sample(1000)["index"].tolist()) == {1}


def test_t12_an_update_of_an_overwritten_row_is_skipped_and_counted(backend: str) -> None:
    replay = prioritized([1.0] * 4, eps=0.0, alpha=1.0)
    index = replay.sample(64)["index"]
    for i in range(3):
        replay.add([4.0 + i], 0.0, 4.0 + i, False, False, [5.0 + i])
    stale = replay.update_priority(torch.tensor([0, 1, 2, 3]), torch.tensor([0.0, 0.0, 0.0, 7.0]))
    assert stale == 3
    assert set(replay.sample(1000)["index"].tolist()) == {3, 4, 5, 6}
    assert set(index.tolist()) <= {0, 1, 2, 3}
    for never in (7, 8, 2**40, -1):
        with pytest.raises(IndexError, match="expected the id of a stored transition"):
            replay.update_priority([never], [1.0])


def chi_squared(slots: torch.Tensor, probability: np.ndarray) -> float:
    expected = probability * len(slots)
    found = np.bincount(slots.numpy(), minlength=len(probability))[: len(probability)]
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("wrapped", [False, True])
class TestT13Draws:
    def test_draws_are_uniform(self, backend: str, wrapped: bool) -> None:
        replay = rl.ReplayBuffer(100, obs=1, action=(), num_envs=4, seed=3)
        world = World(np.random.default_rng(0), 4)
        for _ in range(60 if wrapped else 20):
            replay.add(**arrays([world.step(env) for env in range(4)]))
        ids = replay.sample(60 * len(replay))["index"]
        known = {row: i for i, row in enumerate(torch.cat([e["index"] for e in replay.episodes()]).tolist())}
        assert len(known) == len(replay)
        place = torch.tensor([known[row] for row in ids.tolist()])
        # The mean of χ² is the number of cells; four standard deviations above it is a failure in 1 of 10⁴ seeds.
        cells = len(replay)
        assert chi_squared(place, np.full(cells, 1 / cells)) < cells + 4 * (2 * cells) ** 0.5

    def test_draws_follow_the_priorities(self, backend: str, wrapped: bool) -> None:
        replay = prioritized(list(np.linspace(0.1, 5, 50)), eps=0.0, alpha=1.0)
        if wrapped:
            for i in range(70):
                replay.add([50.0 + i], 0.0, 0.0, False, False, [51.0 + i])
            replay.update_priority(torch.arange(70, 120), torch.linspace(0.1, 5, 50))
        ids = replay.sample(5000)["index"] - (70 if wrapped else 0)
        mass = np.linspace(0.1, 5, 50)
        # Stratified draws scatter less than independent ones: only too large a deviation is wrong.
        assert chi_squared(ids, mass / mass.sum()) < 50 + 4 * 10


def goal_buffer(lengths: list[int], capacity: int, seed: int = 0) -> rl.ReplayBuffer:
    """Return a buffer with episodes of a walker on a line: achieved goal = 100·episode + step."""
    replay = rl.ReplayBuffer(capacity, obs={"at": 1, "goal": 1}, action=(), seed=seed)
    for episode, length in enumerate(lengths):
        for t in range(length):
            at, goal = 100.0 * episode + t, -1.0
            end = t == length - 1
            replay.add({"at": [at], "goal": [goal]}, 0.0, 0.0, False, end, {"at": [at + 1], "goal": [goal]})
    return replay


def is_reached(achieved: torch.Tensor, goal: torch.Tensor, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    hit = (achieved == goal).squeeze(-1)
    assert rows.batch_size == hit.shape
    return hit.float() - 1, hit


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("capacity", [100, 20])
def test_t14_hindsight_goals_are_of_the_same_episode_and_recomputed(backend: str, strategy: Any, capacity: int) -> None:
    replay = goal_buffer([7, 3, 9, 5], capacity)
    view = rl.Hindsight("goal", "at", is_reached, ratio=1.0, strategy=strategy)
    batch = replay.sample(500, view)
    at, goal = batch["obs", "at"].squeeze(1), batch["obs", "goal"].squeeze(1)
    episode, step = at // 100, at % 100
    length = torch.tensor([7.0, 3.0, 9.0, 5.0])[episode.long()]
    assert torch.equal(goal, batch["next_obs", "goal"].squeeze(1))
    assert torch.equal(goal // 100, episode)
    reached_step = goal % 100
    if strategy == "final":
        assert torch.equal(reached_step, length)
    elif strategy == "future":
        assert ((reached_step >= step + 1) & (reached_step <= length)).all()
        assert (reached_step == length).any()
        assert (reached_step == step + 1).any()
    else:
        assert ((reached_step >= 1) & (reached_step <= length)).all()
        assert (reached_step <= step).any()
    hit = batch["next_obs", "at"].squeeze(1) == goal
    assert torch.equal(batch["terminated"], hit)
    assert torch.equal(batch["reward"], hit.float() - 1)


def test_t14_rows_without_hindsight_keep_their_goal(backend: str) -> None:
    replay = goal_buffer([30], 100)
    batch = replay.sample(4000, rl.Hindsight("goal", "at", is_reached, ratio=0.25))
    is_unchanged = batch["obs", "goal"].squeeze(1) == -1
    assert 0.70 < float(is_unchanged.float().mean()) < 0.80
    assert not batch["reward"][is_unchanged].any()
    assert not batch["terminated"][is_unchanged].any()


def test_t14_n_steps_stop_where_the_new_goal_is_reached(backend: str) -> None:
    replay = goal_buffer([6], 100)
    batch = replay.sample(300, rl.Hindsight("goal", "at", is_reached, ratio=1.0, view=rl.NStep(3, 0.5)))
    at, goal = batch["obs", "at"].squeeze(1), batch["obs", "goal"].squeeze(1)
    steps = torch.minimum(torch.tensor(3.0), goal - at)
    assert torch.equal(batch["next_obs", "at"].squeeze(1), at + steps)
    assert torch.equal(batch["terminated"], goal - at <= 3)
    assert torch.equal(batch["discount"], 0.5**steps)
    missed = steps - batch["terminated"].float()
    assert torch.allclose(batch["reward"], -(1 - 0.5**missed) / 0.5)


@settings(max_examples=40, deadline=None)
@given(
    seed=seeds, rows=st.integers(1, 12), num_envs=st.integers(1, 3), next_step=st.booleans(), native=st.booleans(),
    length=st.integers(1, 5), burn_in=st.integers(0, 4),
)  # fmt: skip
def test_t15_t16_sequences_stay_in_their_episode_after_their_burn_in(
    seed: int, rows: int, num_envs: int, next_step: bool, native: bool, length: int, burn_in: int
) -> None:
    both = Both(rows, num_envs, np.random.default_rng(seed), next_step=next_step)
    both.play(14)
    ids = sorted(both.expected)
    if not ids:
        return
    with rl.kernels.force_torch() if not native else pytest.MonkeyPatch.context():
        batch = read(both.replay, ids, rl.Sequence(length, burn_in))
    for i, row in enumerate(ids):
        column = both.columns[row % num_envs]
        before, after = column.run_before(row // num_envs, burn_in), column.run(row // num_envs, length)
        steps, mask, train = around(before, after, length, burn_in)
        assert batch[("mask",)][i].tolist() == mask
        assert batch[("train",)][i].tolist() == train
        for name in ("obs", "reward", "next_obs", "terminated"):
            found = batch[(name,)][i].flatten().tolist()
            assert found == [step[name] if step else 0.0 for step in steps]
    # Every stored row starts a sequence, the last step of an episode too.
    assert len(batch[("mask",)]) == len(ids)


def test_t15_sequences_cross_episodes_on_request(backend: str) -> None:
    replay = goal_buffer([3, 2, 4], 100)
    view = rl.Sequence(5, burn_in=1, cross_episodes=True)
    batch = read(replay, replay.sample(1)["index"].tolist(), view)
    ids = sorted(torch.cat([episode["index"] for episode in replay.episodes()]).tolist())
    batch = read(replay, ids, view)
    steps = [0.0, 1.0, 2.0, 100.0, 101.0, 200.0, 201.0, 202.0, 203.0]
    starts = {0.0, 100.0, 200.0}
    for i in range(len(ids)):
        window, mask, train = around(steps[:i], steps[i:], 5, 1)
        assert batch[("obs", "at")][i].flatten().tolist() == [at or 0.0 for at in window]
        assert batch[("mask",)][i].tolist() == mask
        assert batch[("train",)][i].tolist() == train
        assert batch[("is_first",)][i].tolist() == [at in starts for at in window]


def test_t20_the_seed_decides_the_draws_and_no_global_generator_is_touched(backend: str) -> None:
    def draw_rows(seed: int | None, sampler: Any) -> list[int]:
        replay = rl.ReplayBuffer(64, obs=1, action=(), sampler=sampler, seed=seed)
        for i in range(64):
            replay.add([float(i)], 0.0, 0.0, False, False, [i + 1.0])
        view = rl.Hindsight(("obs",), ("obs",), lambda a, g, rows: (rows["reward"], rows["terminated"]))
        return replay.sample(20)["index"].tolist() + replay.sample(20, view)["obs"].flatten().tolist()

    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002
    for sampler in (rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()):
        assert draw_rows(3, sampler) == draw_rows(3, sampler)
        assert draw_rows(3, sampler) != draw_rows(4, sampler)
        assert draw_rows(None, sampler) != draw_rows(None, sampler)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state(legacy=False)["state"]["key"])  # noqa: NPY002


def test_t21_inputs_and_batches_are_copies(backend: str) -> None:
    replay = rl.ReplayBuffer(8, obs=1, action=1, next_obs="shared")
    obs, action, following = np.ones(1, np.float32), np.ones(1, np.float32), np.full(1, 2.0, np.float32)
    replay.add(obs, action, 1.0, False, False, following)
    obs[:], action[:], following[:] = 7, 7, 7
    batch = replay.sample(4)
    for leaf in batch.values():
        leaf.zero_()
    (episode,) = replay.episodes()
    assert (episode["obs"].item(), episode["action"].item(), episode["next_obs"].item()) == (1.0, 1.0, 2.0)


def test_t21_an_environment_that_reuses_its_array_warns(backend: str) -> None:
    replay = rl.ReplayBuffer(8, obs=2, action=())
    for obs in (np.zeros(2, np.float32), np.zeros(2), torch.zeros(2)):
        with pytest.raises(
            rl.SchemaError, match="next_obs: expected memory apart from obs, got memory shared with obs.*stage"
        ):
            replay.add(obs, 0.0, 0.0, False, False, obs)
    both = np.zeros(3, np.float32)
    with pytest.raises(rl.SchemaError, match="memory apart from obs"):
        replay.add(both[:2], 0.0, 0.0, False, False, both[1:])
    assert len(replay) == 0
    obs = np.zeros(2, np.float32)
    for i in range(3):
        replay.stage(obs=obs, action=0.5)
        obs += 1
        replay.add(reward=float(i), terminated=False, truncated=False, next_obs=obs)
    (episode,) = replay.episodes()
    assert episode["obs"][:, 0].tolist() == [0.0, 1.0, 2.0]
    assert episode["next_obs"][:, 0].tolist() == [1.0, 2.0, 3.0]


def test_t22_uint8_stays_uint8_float64_rewards_are_accepted_float_into_integers_is_refused(backend: str) -> None:
    replay = rl.ReplayBuffer(4, obs=gym.spaces.Box(0, 255, (2,), np.uint8), action=gym.spaces.Discrete(3))
    with pytest.raises(rl.SchemaError, match="^next_obs: expected uint8, got float32"):
        replay.add(np.zeros(2, np.uint8), 1, 0.0, False, False, np.zeros(2, np.float32))
    with pytest.raises(rl.SchemaError, match="^action: expected int64, got float64"):
        replay.add(np.zeros(2, np.uint8), 1.0, 0.0, False, False, np.zeros(2, np.uint8))
    replay.add(np.full(2, 200, np.uint8), 1, np.float64(0.1), False, False, np.full(2, 201, np.uint8))
    batch = replay.sample(2)
    assert batch["obs"].dtype == batch["next_obs"].dtype == torch.uint8
    assert batch["next_obs"].unique().tolist() == [201]
    assert batch["reward"].dtype == torch.float32


def test_t23_too_little_data_is_an_error(backend: str) -> None:
    replay = rl.ReplayBuffer(4, obs=1, action=(), sampler=rl.WithoutReplacement())
    with pytest.raises(rl.NotReadyError, match="sample: expected at least 1 stored transition, got 0"):
        replay.sample(1)
    replay.add([0.0], 0.0, 0.0, False, False, [1.0])
    with pytest.raises(rl.NotReadyError, match="sample: expected at least 8 stored transitions, got 1"):
        replay.sample(8)
    assert len(replay.sample(1)) == 1


def test_t24_clear_forgets_rows_priorities_and_open_episodes_but_not_the_numbers(backend: str) -> None:
    replay = prioritized([9.0, 1.0, 5.0])
    replay.clear()
    assert len(replay) == 0
    with pytest.raises(rl.NotReadyError):
        replay.sample(1)
    replay.add([3.0], 0.0, 3.0, False, False, [4.0])
    batch = replay.sample(50)
    assert set(batch["index"].tolist()) == {3}
    assert set(batch["weight"].tolist()) == {1.0}
    assert replay.update_priority([0, 1, 2], [1.0, 1.0, 1.0]) == 3
    window = read(replay, [3], rl.Sequence(1, burn_in=2))
    assert window[("mask",)].tolist() == [[True, False, False]]
    assert window[("is_first",)].tolist() == [[True, False, False]]


def test_t24_the_largest_priority_of_forgotten_rows_is_forgotten(backend: str) -> None:
    replay = prioritized([9.0, 1.0, 5.0])
    replay.clear()
    replay.add([3.0], 0.0, 3.0, False, False, [4.0])
    replay.update_priority([3], [1.0])
    replay.add([4.0], 0.0, 3.0, False, False, [5.0])  # as likely as the first: 1, not 9
    assert set(replay.sample(50)["weight"].tolist()) == {1.0}


class TestT26Stacks:
    @pytest.mark.parametrize("axis", select(0, of=[-1, 0, 1]))
    @pytest.mark.parametrize("pad", select("repeat", of=["repeat", "zero"]))
    @pytest.mark.parametrize("next_step", [False, True])
    def test_rebuilt_stacks_equal_the_added_stacks(self, backend: str, axis: int, pad: Any, next_step: bool) -> None:
        random = np.random.default_rng(axis + 5)
        mode = "NEXT_STEP" if next_step else None
        field = rl.Stacked(rl.Field((3, 2), torch.uint8), 4, axis=axis, pad=pad)
        replay = rl.ReplayBuffer(24, obs=field, action=(), num_envs=2, autoreset=mode, seed=0)
        frames: list[list[np.ndarray]] = [[], []]
        resetting = [False, False]

        def stack(env: int) -> np.ndarray:
            newest = frames[env][-4:]
            padding = newest[0] if pad == "repeat" else np.zeros_like(newest[0])
            return np.stack([padding] * (4 - len(newest)) + newest, axis)

        def frame() -> np.ndarray:
            return random.integers(1, 255, (3, 2), dtype=np.uint8)

        given: dict[float, tuple[np.ndarray, np.ndarray]] = {}
        for env in range(2):
            frames[env] = [frame()]
        for t in range(70):
            obs, following, ends, rewards = [], [], [], []
            for env in range(2):
                obs.append(stack(env))
                reset = resetting[env]
                frames[env] = [frame()] if reset else [*frames[env], frame()]
                following.append(stack(env))
                ends.append(not reset and random.random() < 0.2)
                rewards.append(float(2 * t + env))
                if not reset:
                    given[rewards[-1]] = (obs[-1], following[-1])
                resetting[env] = ends[-1] and next_step
                if ends[-1] and not next_step:
                    frames[env] = [frame()]
            flags = np.zeros(2, bool)
            replay.add(np.stack(obs), np.zeros(2), np.array(rewards), np.array(ends), flags, np.stack(following))
            replay.check()
            batch = replay[torch.cat([episode["index"] for episode in replay.episodes()])]
            for i, reward in enumerate(batch["reward"].tolist()):
                assert np.array_equal(batch["obs"][i].numpy(), given[reward][0])
                assert np.array_equal(batch["next_obs"][i].numpy(), given[reward][1])
        assert len(replay) >= 12

    def test_inconsistent_stacks_are_refused_and_nothing_changes(self, backend: str) -> None:
        replay = rl.ReplayBuffer(8, obs=rl.Stacked(rl.Field((2,), torch.uint8), 3, axis=0), action=())
        frame = np.arange(20, dtype=np.uint8).reshape(10, 2)
        first, second = np.stack([frame[0]] * 3), np.stack([frame[0], frame[0], frame[1]])
        with pytest.raises(rl.SchemaError, match="^obs: expected a stack of the stored frames"):
            replay.add(second, 0.0, 0.0, False, False, np.stack([frame[0], frame[1], frame[2]]))
        with pytest.raises(rl.SchemaError, match="^next_obs: expected a stack of obs one frame later"):
            replay.add(first, 0.0, 0.0, False, False, np.stack([frame[5], frame[0], frame[1]]))
        assert len(replay) == 0
        replay.add(first, 0.0, 0.0, False, False, second)
        with pytest.raises(rl.SchemaError, match="^obs: expected a stack of the stored frames"):
            replay.add(np.stack([frame[7], frame[0], frame[1]]), 0.0, 0.0, False, False, second.copy())
        replay.add(second.copy(), 0.0, 1.0, False, False, np.stack([frame[0], frame[1], frame[2]]))
        assert len(replay) == 2
        (episode,) = replay.episodes()
        assert episode["obs"][1].tolist() == second.tolist()

    def test_blocks_are_checked_like_steps(self, backend: str) -> None:
        frames = np.arange(1, 13, dtype=np.uint8).reshape(6, 2)
        padded = np.concatenate([frames[:1], frames[:1], frames])
        stacks = np.stack([padded[i : i + 3] for i in range(6)])
        block = {
            "obs": stacks[:-1], "next_obs": stacks[1:], "action": np.zeros(5), "reward": np.arange(5.0),
            "terminated": np.zeros(5, bool), "truncated": np.zeros(5, bool),
        }  # fmt: skip
        replay = rl.ReplayBuffer(8, obs=rl.Stacked(rl.Field((2,), torch.uint8), 3, axis=0), action=())
        wrong = {**block, "obs": np.concatenate([stacks[:3], stacks[2:4]])}
        with pytest.raises(rl.SchemaError, match="a stack of"):
            replay.extend(wrong)
        assert len(replay) == 0
        replay.extend(block)
        (episode,) = replay.episodes()
        assert np.array_equal(episode["obs"].numpy(), stacks[:-1])
        assert np.array_equal(episode["next_obs"].numpy(), stacks[1:])


def test_t27_t28_wrong_shapes_and_values_are_refused_and_nothing_changes(backend: str) -> None:
    replay = rl.ReplayBuffer(32, obs=3, action=gym.spaces.Discrete(2), num_envs=8)
    good: dict[str, Any] = {
        "obs": np.ones((8, 3)),
        "action": np.ones(8, int),
        "reward": np.ones(8),
        "terminated": np.zeros(8, bool),
        "truncated": np.zeros(8, bool),
        "next_obs": np.full((8, 3), 2.0),
    }
    replay.add(**good)
    state = [tensor.clone() for tensor in (*replay.storage.rows.leaves, *replay.storage.rows.ring.state.values())]
    wrong: dict[str, list[Any]] = {
        "obs": [np.zeros(3), np.zeros((1, 3)), np.zeros((3, 8)), None],
        "next_obs": [np.zeros(3), np.zeros((8, 3, 1)), None],
        "action": [0, np.zeros((8, 1), int), np.zeros(8)],
        "reward": [np.zeros((8, 1)), 0.0, np.zeros(1)],
        "terminated": [False, np.zeros(8), np.zeros((8, 1), bool)],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(rl.SchemaError, match=f"^{name}: expected .*, got .*"):
                replay.add(**{**good, name: value})
    with pytest.raises(rl.SchemaError, match="^nonsense: expected a declared field"):
        replay.add(**good, nonsense=1)
    for env_ids, error in (
        [[0, 0], rl.SchemaError],
        [[8], IndexError],
        [[-1], IndexError],
        [[0.5], rl.SchemaError],
        [3, rl.SchemaError],
    ):
        with pytest.raises(error, match="env_ids"):
            replay.add(**good, env_ids=env_ids)
    now = [*replay.storage.rows.leaves, *replay.storage.rows.ring.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, now, strict=True))
    assert len(replay) == 8
