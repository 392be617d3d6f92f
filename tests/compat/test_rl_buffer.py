"""rl-buffer's classes on our core: its README, golden numbers and our corrections."""

from __future__ import annotations

import inspect
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from relive.compat import rl_buffer
from relive.compat.rl_buffer import (
    PrioritizedReplayBatch,
    PrioritizedReplayBuffer,
    ReplayBatch,
    ReplayBuffer,
    ResetStrategy,
    RolloutBatch,
    RolloutBuffer,
    StatsTracker,
    SumTree,
    explained_variance,
)
from tests.compat.documents import blocks
from tests.reference import estimators as reference
from tests.reference.priority import SlowTree

T, N = 4, 3


def make_replay(size: int = T, kind: Any = ReplayBuffer, **options: Any) -> Any:
    options = {"obs_shape": (2,), "action_shape": (1,), "stats_tracker": StatsTracker(N), "seed": 0, **options}
    return kind(size, N, **options)


def count_steps(tracker: StatsTracker) -> float:
    """Count the steps of all environments in a tracker that still has every episode."""
    finished = sum(info["ep_lengths"] for info in tracker.ep_info_buffer)
    return finished + tracker._current_episode_stats["lengths"].sum()


def make_transition(t: int, **changed: Any) -> dict[str, Any]:
    """Make a replay step: obs = 10·t + n, action = t, reward = 100·t + n, next_obs = obs + 0.5."""
    obs = (10.0 * t + torch.arange(N)).unsqueeze(1).expand(N, 2).clone()
    fields = {
        "obs": obs,
        "action": torch.full((N, 1), float(t)),
        "reward": 100.0 * t + torch.arange(N),
        "done": torch.zeros(N, dtype=torch.bool),
        "next_obs": obs + 0.5,
        "truncated": torch.zeros(N),
    }
    return {**fields, **changed}


def make_rollout(size: int = T, **options: Any) -> RolloutBuffer:
    return RolloutBuffer(size, N, (2,), (1,), **{"stats_tracker": StatsTracker(N), "seed": 0, **options})


def make_step(t: int, **changed: Any) -> dict[str, Any]:
    """Make a rollout step: obs = t, reward = 100·t + n, value = 10·t."""
    fields = {
        "obs": torch.full((N, 2), float(t)),
        "action": torch.full((N, 1), float(t)),
        "reward": 100.0 * t + torch.arange(N),
        "done": torch.zeros(N, dtype=torch.bool),
        "value": torch.full((N,), 10.0 * t),
        "log_prob": torch.full((N,), -float(t)),
    }
    return {**fields, **changed}


def make_rollout_of_one_env(
    rewards: list[float], values: list[float], dones: list[int], **options: Any
) -> RolloutBuffer:
    """Make a rollout of one environment."""
    buffer = RolloutBuffer(len(rewards), 1, (1,), (1,), stats_tracker=StatsTracker(1), **options)
    for reward, done, value in zip(rewards, dones, values, strict=True):
        one = torch.zeros(1, 1)
        buffer.add(one, one, torch.tensor([reward]), torch.tensor([bool(done)]), torch.tensor([value]), torch.zeros(1))
    return buffer


class TestReadme:
    @pytest.mark.parametrize("number", [0, 1])
    def test_the_examples_run_as_printed_but_for_their_imports(
        self, number: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = blocks("rl_buffer")[number]
        source = source.replace("from rl_buffer.", "from relive.compat.rl_buffer.")
        names: dict[str, Any] = {}
        exec(source, names)
        printed = capsys.readouterr().out
        if number == 0:
            assert "Current size: 1000" in printed
            assert "observations shape: torch.Size([64, 16])" in printed
            assert "Rollout/rewards_mean: " in printed
            assert names["replay_buffer"].total_current_size == 4000
        else:
            assert "Epoch 4: Trained on 16 mini-batches." in printed
            assert "No complete episodes" in printed


class TestStatsTracker:
    def tracker(self, **options: Any) -> StatsTracker:
        options = {"extra_metrics_keys": ["score"], "done_reason_keys": ["timeout", "success"], **options}
        return StatsTracker(2, "test", 10, **options)

    def test_starts_with_nothing(self) -> None:
        tracker = StatsTracker(3, extra_metrics_keys=["score", "energy", "rewards"])
        assert tracker.metrics_keys == ["energy", "lengths", "rewards", "score"]
        assert (tracker.num_envs, tracker.category, tracker.trajectory_num) == (3, "Rollout", 0)
        assert tracker.get_statistics() == {}
        assert tracker.get_raw_values() == {}
        assert tracker.ep_info_buffer == deque()

    def test_adds_up_each_environments_episode(self) -> None:
        tracker = self.tracker()
        tracker.update(np.array([0, 0]), np.array([1.0, 2.0]), {"score": np.array([10, 20])})
        assert tracker.get_statistics() == {}
        tracker.update(np.array([1, 0]), np.array([3.0, 4.0]), {"score": np.array([30, 40]), "other": "ignored"})
        assert tracker._current_episode_stats["rewards"].tolist() == [0.0, 6.0]
        assert tracker._current_episode_stats["lengths"].tolist() == [0.0, 2.0]
        assert tracker._current_episode_stats["score"].tolist() == [0.0, 60.0]
        tracker.update(np.array([0, 1]), np.array([5.0, 6.0]), {"score": np.array([50, 60])}, [None, "success"])
        assert tracker.trajectory_num == 2
        assert list(tracker.ep_info_buffer) == [
            {"ep_lengths": 2.0, "ep_rewards": 4.0, "ep_score": 40.0},
            {"ep_lengths": 3.0, "ep_rewards": 12.0, "ep_score": 120.0, "ep_done_success": 1.0},
        ]
        expected = {"lengths": [2.0, 3.0], "rewards": [4.0, 12.0], "score": [40.0, 120.0]}
        expected |= {"step_rewards": [2.0, 4.0], "step_score": [20.0, 40.0]}
        raw = tracker.get_raw_values()
        assert {key: values.tolist() for key, values in raw.items()} == {f"test/{k}": v for k, v in expected.items()}
        of = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
        numbers = {f"test/{key}_{name}": f(values) for key, values in expected.items() for name, f in of.items()}
        rates = {"test/done_timeout_rate": 0.0, "test/done_success_rate": 0.5}
        assert tracker.get_statistics() == pytest.approx(numbers | rates)

    def test_counts_only_reasons_it_knows_where_episodes_end(self) -> None:
        tracker = StatsTracker(3, "test", done_reason_keys=["timeout", "success", "failure"])
        tracker.update([1, 1, 0], np.ones(3), done_reasons=["timeout", "success", "failure"])
        tracker.update([0, 0, 1], np.ones(3), done_reasons=[None, None, "failure"])
        tracker.update([1, 1, 0], np.ones(3), done_reasons=["success", "alien"])
        tracker.update([0, 0, 1], np.ones(3))
        rates = {key: rate for key, rate in tracker.get_statistics().items() if key.endswith("rate")}
        assert rates == pytest.approx(
            {"test/done_timeout_rate": 1 / 6, "test/done_success_rate": 2 / 6, "test/done_failure_rate": 1 / 6}
        )

    def test_reasons_may_be_an_array_and_metrics_a_tensordict(self) -> None:
        tracker = StatsTracker(N, extra_metrics_keys=["score"], done_reason_keys=["fall"])
        reasons, infos = np.array(["fall", None, "fall"], dtype=object), TensorDict({"score": torch.ones(N)}, [N])
        tracker.update(np.ones(N), np.ones(N), infos, reasons)  # pyright: ignore
        buffer = make_replay(stats_tracker=tracker)
        buffer.add(**make_transition(0, done=torch.ones(N)), infos=infos, done_reasons=reasons)
        assert tracker.get_statistics()["Rollout/done_fall_rate"] == pytest.approx(2 / 3)
        assert tracker.get_statistics()["Rollout/score_mean"] == 1

    def test_keeps_the_newest_episodes_only(self) -> None:
        tracker = StatsTracker(1, max_ep_info_buffer=2)
        for reward in (10.0, 20.0, 30.0):
            tracker.update(np.array([1]), np.array([reward]))
        assert tracker.trajectory_num == 2
        assert [info["ep_rewards"] for info in tracker.ep_info_buffer] == [20.0, 30.0]
        assert tracker.get_statistics()["Rollout/rewards_mean"] == 25.0

    def test_rewards_of_several_parts_are_added_up(self) -> None:
        tracker = StatsTracker(2)
        tracker.update(np.array([0, 0]), np.array([[1.0, 0.5], [2.0, 0.0]]))
        tracker.update(torch.tensor([True, True]), torch.tensor([[3.0, 0.5], [1.0, 1.0]]))
        assert tracker.get_statistics()["Rollout/rewards_mean"] == 4.5

    def test_reset_forgets_running_episodes_too(self) -> None:
        tracker = self.tracker()
        tracker.update([1, 0], np.array([1.0, 2.0]))
        tracker.reset()
        assert tracker.get_statistics() == {}
        assert not tracker._current_episode_stats["rewards"].any()


class TestReplay:
    def test_starts_empty_with_all_its_sizes(self) -> None:
        buffer = make_replay(obs_dtype=torch.uint8)
        sizes = (buffer.capacity, buffer.total_capacity, buffer.current_size, buffer.total_current_size, len(buffer))
        assert sizes == (T, T * N, 0, 0, 0)
        assert (buffer._buffer_size, buffer.num_envs, buffer.obs_shape, buffer.action_shape) == (T, N, (2,), (1,))
        assert not buffer.full
        assert buffer.device == buffer.store_device == torch.device("cpu")
        assert buffer._observations.shape == buffer._next_observations.shape == (T, N, 2)
        assert buffer._next_observations.dtype == torch.uint8
        assert buffer._rewards.shape == buffer._dones.shape == buffer._truncateds.shape == (T, N)

    @pytest.mark.parametrize("order", ["document", "code", "keywords"])
    def test_both_argument_orders_are_understood(self, order: str) -> None:
        buffer, given = make_replay(), make_transition(1, truncated=torch.tensor([0.0, 1.0, 0.0]))
        first = [given.pop(name) for name in ("obs", "action", "reward", "done")]
        if order == "document":
            buffer.add(*first, given["next_obs"], given["truncated"])
        elif order == "code":
            buffer.add(*first, given["truncated"], given["next_obs"])
        else:
            buffer.add(*first, **given)
        assert torch.equal(buffer._next_observations[0], given["next_obs"])
        assert buffer._truncateds[0].tolist() == [False, True, False]

    def test_an_observation_that_is_one_number_follows_the_document(self) -> None:
        buffer = make_replay(obs_shape=())
        one = torch.ones(N)
        buffer.add(0 * one, torch.zeros(N, 1), one, 0 * one, 3 * one, 0 * one)
        assert buffer._next_observations[0].tolist() == [3.0] * N

    @settings(deadline=None, max_examples=30)
    @given(adds=st.integers(1, 11), size=st.integers(1, 4))
    def test_every_field_of_a_row_stays_together_and_the_newest_steps_are_kept(self, adds: int, size: int) -> None:
        buffer = make_replay(size)
        for t in range(adds):
            buffer.add(**make_transition(t, done=torch.tensor([t % 3, 0, 1])))
        assert len(buffer) == min(adds, size)
        assert buffer.full == (adds >= size)
        kept = {100.0 * t + n for t in range(max(0, adds - size), adds) for n in range(N)}
        seen: set[float] = set()
        for _ in range(30):
            batch = buffer.get(len(kept))
            t, n = batch.rewards // 100, batch.rewards % 100
            assert torch.equal(batch.observations[:, 0], 10 * t + n)
            assert torch.equal(batch.next_observations, batch.observations + 0.5)
            assert torch.equal(batch.actions[:, 0], t)
            assert torch.equal(batch.dones, ((n == 0) & (t % 3 > 0)) | (n == 2))
            seen |= set(batch.rewards.tolist())
        assert seen <= kept
        if len(kept) <= 6:
            assert seen == kept

    def test_batches_have_their_fields_and_belong_to_the_caller(self) -> None:
        buffer = make_replay(action_dtype=torch.int64)
        buffer.add(**make_transition(1, action=torch.ones(N, 1, dtype=torch.int64)))
        batch = buffer.get(2)
        assert type(batch) is ReplayBatch
        assert batch.actions.dtype == torch.int64
        assert (batch.dones.dtype, batch.truncateds.dtype) == (torch.bool, torch.bool)
        batch.rewards[:] = 0
        assert buffer._rewards[0].tolist() == [100.0, 101.0, 102.0]

    def test_what_cannot_be_drawn_is_said(self) -> None:
        buffer = make_replay()
        with pytest.raises(ValueError, match="^Cannot sample from empty buffer: add"):
            buffer.get(1)
        buffer.add(**make_transition(0))
        with pytest.raises(ValueError, match="^Batch size 4 is larger than available samples: 3"):
            buffer.get(4)
        assert len(buffer.get(3).rewards) == 3

    def test_what_happens_when_it_is_full_may_be_changed(self) -> None:
        buffer = make_replay(2)
        for t in range(2):
            buffer.add(**make_transition(t))
        buffer.reset_strategy = ResetStrategy.ERROR
        with pytest.raises(RuntimeError, match=r"^Buffer is full\. Call reset\(\)"):
            buffer.add(**make_transition(2))
        buffer.reset_strategy = ResetStrategy.RECURRENT
        buffer.add(**make_transition(2))
        assert len(buffer) == 2
        assert torch.equal(buffer._observations[0], make_transition(2)["obs"])
        buffer.reset_strategy = ResetStrategy.AUTO
        buffer.add(**make_transition(3))
        assert len(buffer) == 1
        assert set(buffer.get(3).rewards.tolist()) <= {300.0, 301.0, 302.0}

    @pytest.mark.parametrize("strategy", list(ResetStrategy))
    @pytest.mark.parametrize(
        "wrong", [{"obs": torch.zeros(N, 3)}, {"reward": torch.zeros(N, 1)}, {"next_obs": torch.zeros(1, 2)}]
    )
    def test_a_step_that_does_not_fit_changes_nothing(self, strategy: ResetStrategy, wrong: dict[str, Any]) -> None:
        buffer = make_replay(2, reset_strategy=strategy)
        for t in range(2):
            before = len(buffer), count_steps(buffer.stats_tracker)
            with pytest.raises(ValueError, match="expected shape"):
                buffer.add(**make_transition(7, **wrong))
            assert (len(buffer), count_steps(buffer.stats_tracker)) == before
            buffer.add(**make_transition(t))
        kind = RuntimeError if strategy is ResetStrategy.ERROR else ValueError
        with pytest.raises(kind):
            buffer.add(**make_transition(7, **wrong))
        assert buffer._rewards[:, 0].tolist() == [0.0, 100.0]
        assert len(buffer) == 2

    @pytest.mark.parametrize("strategy", [ResetStrategy.AUTO, ResetStrategy.RECURRENT])
    def test_a_next_observation_in_the_memory_of_the_observation_changes_nothing(self, strategy: ResetStrategy) -> None:
        buffer = make_replay(1, reset_strategy=strategy)
        buffer.add(**make_transition(1))
        world = torch.zeros(N, 2)
        with pytest.raises(ValueError, match="next_obs: expected memory apart from obs, got memory shared with obs"):
            buffer.add(**make_transition(2, obs=world, next_obs=world, done=torch.ones(N)))
        assert buffer._rewards[0].tolist() == [100.0, 101.0, 102.0]
        tracker = buffer.stats_tracker
        assert (len(buffer), count_steps(tracker), tracker.trajectory_num) == (1, N, 0)

    def test_reset_forgets_steps_and_statistics_if_asked(self) -> None:
        buffer = make_replay()
        buffer.add(**make_transition(0, done=torch.ones(N)))
        buffer.reset()
        assert (len(buffer), buffer.full, buffer.stats_tracker.trajectory_num) == (0, False, N)
        buffer.reset(reset_stats=True)
        assert buffer.stats_tracker.trajectory_num == 0

    def test_the_tracker_is_told_of_truncated_ends_if_it_wants_them(self) -> None:
        plain = StatsTracker(N)
        make_replay(stats_tracker=plain).add(**make_transition(1, truncated=torch.ones(N)))
        assert plain.trajectory_num == 0
        tracker = StatsTracker(N, extra_metrics_keys=["score"], done_reason_keys=["late"], truncated_ends=True)
        buffer = make_replay(stats_tracker=tracker)
        assert buffer.stats_tracker is tracker
        ends = {"done": torch.tensor([1.0, 0.0, 0.0]), "truncated": torch.tensor([0.0, 1.0, 0.0])}
        infos = {"score": torch.tensor([1.0, 2.0, 4.0]), "unknown": 3}
        buffer.add(**make_transition(1, **ends), infos=infos, done_reasons=[None, "late", None])
        assert [info["ep_rewards"] for info in tracker.ep_info_buffer] == [100.0, 101.0]
        assert [info["ep_score"] for info in tracker.ep_info_buffer] == [1.0, 2.0]
        assert tracker.get_statistics()["Rollout/done_late_rate"] == 0.5
        buffer.add(**make_transition(2, done=torch.ones(N)))
        assert tracker.ep_info_buffer[-1] == {"ep_lengths": 2.0, "ep_rewards": 304.0, "ep_score": 4.0}

    @pytest.mark.parametrize("strategy", [ResetStrategy.AUTO, ResetStrategy.RECURRENT])
    def test_a_metric_that_does_not_fit_changes_nothing(self, strategy: ResetStrategy) -> None:
        tracker = StatsTracker(N, extra_metrics_keys=["score"])
        buffer = make_replay(1, stats_tracker=tracker, reset_strategy=strategy)
        buffer.add(**make_transition(1))
        with pytest.raises(ValueError, match="score: expected shape"):
            buffer.add(**make_transition(2), infos={"score": torch.zeros(N + 1)})
        assert buffer._rewards[0].tolist() == [100.0, 101.0, 102.0]
        assert (len(buffer), count_steps(tracker)) == (1, N)

    def test_any_object_with_an_update_is_a_tracker(self) -> None:
        told: list[dict[str, Any]] = []

        class Tracker:
            def update(self, **arguments: Any) -> None:
                told.append(arguments)

        make_replay(stats_tracker=Tracker()).add(**make_transition(1), done_reasons=["x"])
        assert told[0]["rewards"].tolist() == [100.0, 101.0, 102.0]
        assert told[0]["dones"].tolist() == [False] * 3
        assert (told[0]["infos"], told[0]["done_reasons"]) == ({}, ["x"])

    def test_batches_come_to_the_device_and_data_stays_on_its_own(self) -> None:
        buffer = make_replay(device=torch.device("meta"), store_device=torch.device("cpu"))
        buffer.add(**make_transition(0))
        assert buffer._observations.device.type == "cpu"
        assert buffer.get(2).observations.device.type == "meta"
        assert make_replay(device=torch.device("meta"))._observations.device.type == "meta"


class TestPrioritized:
    def buffer(self, adds: int = T, **options: Any) -> PrioritizedReplayBuffer:
        buffer = make_replay(kind=PrioritizedReplayBuffer, **{"alpha": 1.0, "beta": 1.0, "epsilon": 0.0, **options})
        for t in range(adds):
            buffer.add(**make_transition(t))
        return buffer

    def test_new_rows_have_the_largest_priority_so_far(self) -> None:
        buffer = self.buffer(adds=0)
        assert (buffer.sum_tree.capacity, buffer._max_priority, buffer.sum_tree.data_pointer) == (12, 1.0, 0)
        buffer.add(**make_transition(0))
        assert buffer.sum_tree.total_priority == 3.0
        assert buffer.sum_tree.data_pointer == 3
        buffer.update_priorities(torch.tensor([1]), torch.tensor([-4.0]))
        assert buffer._max_priority == 4.0
        buffer.add(**make_transition(1))
        assert buffer.sum_tree.total_priority == 1 + 4 + 1 + 3 * 4
        assert buffer.sum_tree.tree[11:17].tolist() == [1.0, 4.0, 1.0, 4.0, 4.0, 4.0]

    def test_rows_are_drawn_in_proportion_to_their_priority(self) -> None:
        buffer = self.buffer(adds=2)
        errors = np.array([0.5, 1.0, 2.0, 0.0, 4.0, 2.5])
        buffer.update_priorities(np.arange(6), errors)
        counts = np.bincount(buffer.get(10_000).indices, minlength=6)
        # Draws are stratified: each comes from another part of the sum of priorities.
        np.testing.assert_allclose(counts / 1000, errors, atol=0.002)

    def test_weights_make_up_for_it(self) -> None:
        buffer = self.buffer(adds=2, alpha=0.7, beta=0.5, epsilon=1e-6)
        errors = torch.tensor([0.1, 0.5, 1.0, 2.0, 3.0, 4.0])
        buffer.update_priorities(torch.arange(6), errors.unsqueeze(1))
        batch = buffer.get(64)
        assert type(batch) is PrioritizedReplayBatch
        mass = (errors + 1e-6) ** 0.7
        probability = mass / mass.sum()
        for beta, got in ((0.5, batch), (1.0, buffer.get(64, beta=1.0)), (0.0, buffer.get(64, beta=0.0))):
            weights = (6 * probability[got.indices]) ** -beta
            torch.testing.assert_close(got.weights, weights / weights.max())
        buffer.beta = 0.0
        assert buffer.get(8).weights.tolist() == [1.0] * 8

    def test_indices_name_rows(self) -> None:
        buffer = self.buffer()
        batch = buffer.get(20)
        assert torch.equal(batch.rewards, 100.0 * (batch.indices // N) + batch.indices % N)

    def test_a_priority_for_a_row_that_was_overwritten_changes_nothing(self) -> None:
        buffer = self.buffer(adds=T + 1)
        buffer.update_priorities(torch.tensor([0, 1, 2]), torch.full((3,), 1000.0))
        assert buffer.sum_tree.total_priority == T * N
        assert buffer._max_priority == 1.0
        with pytest.raises(IndexError):
            buffer.update_priorities(torch.tensor([(T + 1) * N]), torch.ones(1))

    def test_reset_forgets_priorities(self) -> None:
        buffer = self.buffer()
        buffer.reset()
        assert buffer.sum_tree.total_priority == 0
        with pytest.raises(ValueError, match="^Cannot sample from empty buffer: add"):
            buffer.get(1)
        buffer.add(**make_transition(7))
        assert set(buffer.get(30).rewards.tolist()) == {700.0, 701.0, 702.0}

    @pytest.mark.parametrize("wrong", [math.nan, math.inf])
    def test_an_error_that_is_no_number_is_refused(self, wrong: float) -> None:
        buffer = self.buffer()
        with pytest.raises(rl.PriorityError, match=r"priority\[1\]"):
            buffer.update_priorities(torch.tensor([0, 1]), torch.tensor([5.0, wrong]))
        assert buffer.sum_tree.total_priority == T * N

    def test_its_tree_can_be_written(self) -> None:
        buffer = self.buffer(adds=1)
        for leaf in (0, 2):
            buffer.sum_tree.update(leaf, 0.0)
        assert buffer.get(8).indices.tolist() == [1] * 8


class TestRollout:
    def test_starts_empty_with_its_settings(self) -> None:
        buffer = make_rollout()
        assert (buffer.gamma, buffer.gae_lambda, buffer._buffer_size, len(buffer)) == (0.99, 0.95, T, 0)
        assert not buffer.full
        assert buffer._observations.shape == (T, N, 2)

    def test_every_field_is_where_it_was_put(self) -> None:
        buffer = make_rollout()
        for t in range(T):
            buffer.add(**make_step(t, done=torch.tensor([0.0, 1.0, 0.0])))
        assert buffer.full
        assert buffer._observations[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert buffer._rewards[2].tolist() == [200.0, 201.0, 202.0]
        assert buffer._values[3].tolist() == [30.0] * N
        assert buffer._log_probs[3].tolist() == [-3.0] * N
        assert buffer._dones[1].tolist() == [False, True, False]

    def test_golden_advantages_end_with_the_step_that_was_done(self, backend: str) -> None:
        numbers = [10.0, 0.0, 0.0, 100.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0], [0, 0, 1, 0, 0]
        buffer = make_rollout_of_one_env(*numbers, gamma=0.9, gae_lambda=0.8)
        buffer.compute_returns_and_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.bool))
        expected = torch.tensor([9.7488, -1.46, -3.0, 96.9, -5.0])
        torch.testing.assert_close(buffer._advantages[:, 0], expected)
        torch.testing.assert_close(buffer._returns[:, 0], expected + torch.tensor(numbers[1]))

    def test_golden_returns(self) -> None:
        buffer = make_rollout_of_one_env([1.0, 1.0, 1.0], [0.0, 0.0, 10.0], [0, 1, 0], gamma=1.0, gae_lambda=1.0)
        buffer.compute_returns_and_advantages(torch.zeros(1, 1), torch.zeros(1, 1))
        assert buffer._returns[:, 0].tolist() == [2.0, 1.0, 1.0]

    @pytest.mark.parametrize("done", [0, 1])
    @pytest.mark.parametrize("last_done", [0.0, 1.0])
    def test_either_flag_says_that_the_last_step_ended_the_episode(self, done: int, last_done: float) -> None:
        buffer = make_rollout_of_one_env([1.0], [0.0], [done], gamma=0.5, gae_lambda=1.0)
        buffer.compute_returns_and_advantages(torch.tensor([8.0]), torch.tensor([last_done]))
        assert buffer._returns.item() == (1.0 if done or last_done else 5.0)

    @settings(deadline=None)
    @given(
        steps=st.integers(1, 6),
        seed=st.integers(0, 10_000),
        gamma=st.sampled_from([0.5, 0.99, 1.0]),
        lam=st.sampled_from([0.0, 0.95, 1.0]),
    )
    def test_advantages_are_the_written_out_recurrence_also_of_a_part(
        self, steps: int, seed: int, gamma: float, lam: float
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        reward, value = torch.randn(2, steps, N, generator=generator)
        done = torch.rand(steps, N, generator=generator) < 0.3
        last_value = torch.randn(N, generator=generator)
        buffer = make_rollout(6, gamma=gamma, gae_lambda=lam)
        for t in range(steps):
            buffer.add(**make_step(t, reward=reward[t], value=value[t], done=done[t]))
        buffer.compute_returns_and_advantages(last_value, done[-1])
        tensors: dict[str, torch.Tensor | None] = {
            "reward": reward,
            "value": value,
            "next_value": torch.cat([value[1:], last_value[None]]),
            "terminated": done,
            "truncated": torch.zeros_like(done),
            "mask": None,
        }
        advantage, return_ = reference.by_column(reference.gae, tensors, gamma=gamma, lam=lam)
        torch.testing.assert_close(buffer._advantages.double(), advantage, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(buffer._returns.double(), return_, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [("last_values", torch.ones(1)), ("last_dones", torch.ones(1)), ("last_dones", True), ("last_dones", [1] * 4)],
    )
    def test_what_follows_the_last_step_is_one_number_an_environment(self, name: str, wrong: Any) -> None:
        buffer = self.filled()
        before = buffer._returns.clone()
        last = {"last_values": torch.ones(N), "last_dones": torch.zeros(N, dtype=torch.bool), name: wrong}
        with pytest.raises(ValueError, match=rf"^{name}: expected shape \(3,\) for 3 environments"):
            buffer.compute_returns_and_advantages(**last)
        assert torch.equal(buffer._returns, before)

    def filled(self, steps: int = T, **options: Any) -> RolloutBuffer:
        buffer = make_rollout(**options)
        for t in range(steps):
            buffer.add(**make_step(t))
        buffer.compute_returns_and_advantages(torch.zeros(N), torch.zeros(N))
        return buffer

    def test_an_epoch_is_every_step_once_and_may_be_repeated(self) -> None:
        buffer = self.filled()
        for _ in range(2):
            epoch = buffer.get(5)
            assert inspect.isgenerator(epoch)
            batches = list(epoch)
            assert [len(batch.values) for batch in batches] == [5, 5, 2]
            assert sorted(torch.cat([batch.values for batch in batches]).tolist()) == sorted([0, 10, 20, 30] * N)
        first = next(buffer.get(5, shuffle=False))
        assert type(first) is RolloutBatch
        assert first.observations.tolist() == [[0.0, 0.0]] * 3 + [[1.0, 1.0]] * 2
        assert torch.equal(first.advantages, buffer._advantages.flatten()[:5])
        assert torch.equal(first.returns, buffer._returns.flatten()[:5])
        assert first.log_probs.tolist() == [0.0] * 3 + [-1.0] * 2
        assert first.actions.shape == (5, 1)

    def test_a_part_gives_only_what_was_stored(self) -> None:
        assert sum(len(batch.values) for batch in self.filled(2).get(4)) == 2 * N

    def test_there_is_nothing_to_train_on_before_advantages(self) -> None:
        buffer = make_rollout()
        buffer.add(**make_step(0))
        for use in (lambda: buffer.get(4), buffer.normalize_returns, lambda: buffer.advantages_mean):
            words = r"got a rollout without '(advantage|return)'\. Call compute_returns_and_advantages first"
            with pytest.raises(rl.NotReadyError, match=words):
                use()

    def test_a_full_one_refuses_or_starts_again(self) -> None:
        buffer = self.filled()
        with pytest.raises(RuntimeError, match=r"^Buffer is full\. Call reset\(\)"):
            buffer.add(**make_step(4))
        buffer.reset_strategy = ResetStrategy.AUTO
        with pytest.raises(ValueError, match="reward: expected shape"):
            buffer.add(**make_step(4, reward=torch.zeros(1)))
        assert len(buffer) == T
        buffer.add(**make_step(4))
        assert len(buffer) == 1
        assert buffer._observations[0, 0, 0] == 4
        buffer.reset()
        assert (len(buffer), buffer.full) == (0, False)

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_the_oldest_step_makes_room_and_time_stays_in_order(self, size: int) -> None:
        buffer = self.filled(6, size=size, reset_strategy=ResetStrategy.RECURRENT)
        assert buffer._observations[:, 0, 0].tolist() == [float(t) for t in range(6 - size, 6)]
        assert buffer.full
        assert count_steps(buffer.stats_tracker) == 6 * N
        with pytest.raises(ValueError, match="value: expected shape"):
            buffer.add(**make_step(6, value=torch.zeros(N, 1)))
        expected = torch.tensor([100.0 * t for t in range(6 - size, 6)])
        buffer.gamma = 0.0
        buffer.compute_returns_and_advantages(torch.zeros(N), torch.zeros(N))
        torch.testing.assert_close(buffer._returns[:, 0], expected)

    def test_advantages_and_returns_are_scaled_by_the_population(self) -> None:
        buffer = self.filled(3)
        advantages, returns = buffer._advantages.clone(), buffer._returns.clone()
        assert buffer.advantages_mean == pytest.approx(float(advantages.mean()))
        assert buffer.advantages_std == pytest.approx(float(advantages.std()))
        assert buffer.returns_mean == pytest.approx(float(returns.mean()))
        assert buffer.returns_std == pytest.approx(float(returns.std()))
        buffer.normalize_advantages()
        buffer.normalize_returns()
        for got, raw in ((buffer._advantages, advantages), (buffer._returns, returns)):
            torch.testing.assert_close(got, (raw - raw.mean()) / (raw.std(correction=0) + 1e-6))
        one = make_rollout_of_one_env([1.0], [0.0], [1])
        one.compute_returns_and_advantages(torch.zeros(1), torch.zeros(1))
        assert (one.advantages_std, one.returns_std) == (0.0, 0.0)

    def test_explained_variance_is_that_of_the_returns_by_the_values(self) -> None:
        buffer = make_rollout_of_one_env([1.0, 2.0, 4.0], [1.0, 2.0, 2.0], [1, 1, 1])
        buffer.compute_returns_and_advantages(torch.zeros(1), torch.zeros(1))
        value, return_ = np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 4.0])
        expected = 1 - np.var(return_ - value) / np.var(return_)
        assert buffer.explained_variance == pytest.approx(expected)
        assert explained_variance(torch.tensor(value), torch.tensor(return_)) == pytest.approx(expected)
        assert math.isnan(explained_variance(torch.tensor(value), torch.ones(3)))

    def test_a_metric_that_does_not_fit_adds_nothing(self) -> None:
        buffer = make_rollout(stats_tracker=StatsTracker(N, extra_metrics_keys=["score"]))
        with pytest.raises(ValueError, match="score: expected shape"):
            buffer.add(**make_step(0), infos={"score": torch.zeros(N + 1)})
        assert len(buffer) == 0
        buffer.add(**make_step(0, done=torch.ones(N)), infos={"score": torch.ones(N)})
        assert buffer.stats_tracker.get_statistics()["Rollout/score_mean"] == 1.0


class TestSumTree:
    def test_priorities_are_written_in_a_circle(self) -> None:
        tree = SumTree(4)
        assert tree.tree.tolist() == [0.0] * 7
        for priority, pointer, total in ((3.0, 1, 3.0), (5.0, 2, 8.0), (2.0, 3, 10.0), (1.0, 0, 11.0), (4.0, 1, 12.0)):
            tree.add(priority)
            assert (tree.data_pointer, tree.total_priority) == (pointer, total)
        tree.update(idx=1, priority=1.0)
        assert tree.total_priority == 8.0
        assert tree.tree.tolist() == [8.0, 5.0, 3.0, 4.0, 1.0, 2.0, 1.0]

    @given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=9), st.integers(0, 7))
    def test_a_point_finds_the_leaf_it_lies_in(self, priorities: list[float], eighth: int) -> None:
        tree, slow = SumTree(len(priorities)), SlowTree(len(priorities))
        slow.set(range(len(priorities)), priorities)
        for priority in priorities:
            tree.add(priority)
        assert tree.tree[0] == tree.total_priority == sum(priorities)
        if not sum(priorities):
            with pytest.raises(rl.NotReadyError):
                tree.get(0.0)
            return
        (expected,) = slow.draw([eighth / 8])
        assert tree.get(sum(priorities) * eighth / 8) == (expected, priorities[expected])

    def test_beyond_the_total_lies_the_last_positive_leaf(self) -> None:
        tree = SumTree(3)
        for priority in (1.0, 2.0, 0.0):
            tree.add(priority)
        assert tree.get(3.0) == (1, 2.0)

    def test_what_is_no_priority_is_refused(self) -> None:
        tree = SumTree(2)
        for wrong in (-1.0, math.nan, math.inf):
            with pytest.raises(rl.PriorityError, match="priority: expected a finite number of at least 0"):
                tree.add(wrong)
        for wrong in (-1, 2):
            with pytest.raises(IndexError, match="idx: expected 0 to 1"):
                tree.update(wrong, 1.0)
        assert (tree.total_priority, tree.data_pointer) == (0.0, 0)


@pytest.mark.skipif(not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="needs Linux and a compiler")
class TestSharing:
    def make(self, **options: Any) -> rl_buffer.SharedReplayBuffer:
        options = {"is_main_process": True, "seed": 0, **options}
        return rl_buffer.SharedReplayBuffer(3, 2, (1,), (), rl_buffer.StatsTracker(2), **options)

    def test_the_main_process_is_given_nothing_and_a_worker_something(self) -> None:
        components, states = self.make().get_shared_components()
        with pytest.raises(ValueError, match="expected no shared components in the main process"):
            self.make(shared_memory_components=components)
        with pytest.raises(ValueError, match="expected no shared components in the main process"):
            self.make(shared_states=states)
        with pytest.raises(ValueError, match="expected the main process's shared components in a worker, got None"):
            self.make(is_main_process=False)
