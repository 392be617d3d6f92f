"""The rollout buffer: what goes in comes out, once, where it belongs."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl

N = 3


def step(t: int, *, n: int = N, **changed: Any) -> dict[str, Any]:
    """One step with numbers to recognise: obs = t, action = t, reward = 10·t + n, value = 10·t."""
    fields = {
        "obs": np.full((n, 2), t, np.float32),
        "action": np.full(n, t),
        "reward": 10.0 * t + np.arange(n),
        "terminated": np.zeros(n, bool),
        "truncated": np.zeros(n, bool),
        "value": np.full(n, 10.0 * t),
        "log_prob": np.full(n, -1.0 * t),
    }
    return {**fields, **changed}


def make(num_steps: int = 4, *, filled: int | None = None, **options: Any) -> rl.RolloutBuffer:
    options = {"obs": 2, "action": gym.spaces.Discrete(9), "num_envs": N, "seed": 0, **options}
    rollout = rl.RolloutBuffer(num_steps, **options)
    for t in range(num_steps if filled is None else filled):
        rollout.add(**step(t))
    return rollout


class TestStoring:
    def test_every_field_is_where_it_was_put(self, backend: str) -> None:
        rollout = make()
        data = rollout.data
        assert data.batch_size == torch.Size([4, N])
        assert data["obs"][:, :, 0].tolist() == [[t] * N for t in range(4)]
        assert data["action"].tolist() == [[t] * N for t in range(4)]
        assert data["action"].dtype == torch.int64
        assert data["reward"].tolist() == [[10 * t + n for n in range(N)] for t in range(4)]
        assert data["value"].tolist() == [[10 * t] * N for t in range(4)]
        assert data["log_prob"].tolist() == [[-t] * N for t in range(4)]
        assert data["mask"].all()
        assert len(rollout) == 4 * N
        assert rollout.num_stored == 4
        assert rollout.is_full

    def test_data_shares_the_buffers_memory(self) -> None:
        rollout = make()
        rollout.data["obs"][1] = 7
        assert rollout["obs"][1].tolist() == [[7, 7]] * N

    def test_a_full_buffer_refuses_another_step(self) -> None:
        rollout = make()
        with pytest.raises(rl.BufferFullError, match=r"add: expected at most 4 steps, got 5\. Train on"):
            rollout.add(**step(5))
        with pytest.raises(rl.BufferFullError):
            rollout.stage(obs=np.zeros((N, 2)))
        assert len(rollout) == 4 * N

    def test_value_and_log_prob_are_zero_in_the_memory_when_not_given_never_stale(self, backend: str) -> None:
        rollout = make()
        rollout.clear()
        rollout.add(**step(1, value=None, log_prob=None))
        assert not rollout.columns["value"][0].any()
        assert not rollout.columns["log_prob"][0].any()

    @pytest.mark.parametrize("name", ["obs", "action", "reward", "terminated", "truncated"])
    def test_a_missing_field_is_named(self, backend: str, name: str) -> None:
        with pytest.raises(rl.SchemaError, match=f"^{name}: expected a value, got None"):
            make(filled=0).add(**{**step(0), name: None})

    def test_an_unknown_field_is_named_with_the_known_ones(self) -> None:
        rollout = make(filled=0, extra={"hint": 1})
        with pytest.raises(rl.SchemaError, match=r"^hont: expected a declared field \(obs, action, .*hint\)"):
            rollout.add(**step(0), hont=np.zeros((N, 1)))
        with pytest.raises(rl.SchemaError, match="^hint: expected a value, got None"):
            rollout.add(**step(0))

    def test_extra_fields_of_any_kind_join_the_batches(self, backend: str) -> None:
        extra = {
            "action_mask": rl.Field(9, torch.bool),
            "privileged": {"mass": (), "map": rl.Field((2, 2), torch.uint8)},
        }
        rollout = make(filled=0, extra=extra)
        for t in range(4):
            privileged = {"mass": np.full(N, t / 2), "map": np.full((N, 2, 2), t, np.uint8)}
            rollout.add(**step(t), action_mask=np.full((N, 9), t % 2 == 0), privileged=privileged)
        batch = next(rollout.minibatches(4 * N, shuffle=False))
        time = batch["obs"][:, 0]
        assert batch["action_mask"].dtype == torch.bool
        assert torch.equal(batch["action_mask"][:, 0], time % 2 == 0)
        assert torch.equal(batch["privileged", "mass"], time / 2)
        assert torch.equal(batch["privileged", "map"][:, 1, 1], time.to(torch.uint8))

    def test_several_agents_have_an_axis_of_their_own(self, backend: str) -> None:
        rollout = rl.RolloutBuffer(2, N, obs=(2, 3), action=rl.Field(2, torch.int64), reward=(2,), value=(2,))
        for t in range(2):
            rollout.add(
                np.zeros((N, 2, 3)),
                np.zeros((N, 2), int),
                np.full((N, 2), [1.0, 10.0]),
                np.full(N, t == 1),
                np.zeros(N, bool),
                value=np.zeros((N, 2)),
                log_prob=np.zeros((N, 2)),
            )
        rollout.compute_advantage(np.zeros((N, 2)), gamma=1.0, lam=1.0)
        assert rollout["advantage"].tolist() == [[[2.0, 20.0]] * N, [[1.0, 10.0]] * N]

    def test_log_prob_can_be_declared_otherwise(self) -> None:
        rollout = rl.RolloutBuffer(1, N, obs=2, action=2, reward=(2,), extra={"log_prob": ()})
        flags = np.zeros(N, bool)
        rollout.add(np.zeros((N, 2)), np.zeros((N, 2)), np.zeros((N, 2)), flags, flags, log_prob=np.ones(N))
        assert rollout["log_prob"].tolist() == [[1.0] * N]

    def test_one_environment_has_no_environment_axis(self, backend: str) -> None:
        rollout = rl.RolloutBuffer(3, None, obs=2, action=gym.spaces.Discrete(4))
        for t in range(3):
            rollout.add(np.full(2, t), t, float(t), t == 2, False, value=torch.tensor(0.5), log_prob=-1)
        assert rollout.data.batch_size == torch.Size([3])
        assert rollout["reward"].tolist() == [0.0, 1.0, 2.0]
        rollout.compute_advantage(0.0, gamma=1.0, lam=1.0)
        assert rollout["return"].tolist() == [3.0, 3.0, 2.0]
        rollout.attach(tag=torch.arange(3))
        batch = next(rollout.minibatches(3, shuffle=False))
        assert batch["index"].tolist() == [0, 1, 2]
        assert batch["obs"].shape == (3, 2)
        assert batch["tag"].tolist() == [0, 1, 2]
        assert rollout.env_major().batch_size == torch.Size([1, 4])

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3", None])
    def test_sizes_must_be_positive_ints(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="num_steps: expected a positive int"):
            rl.RolloutBuffer(wrong, 2, obs=1, action=1)
        if wrong is not None:
            with pytest.raises(rl.SchemaError, match="num_envs: expected a positive int"):
                rl.RolloutBuffer(2, wrong, obs=1, action=1)

    @pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"])
    def test_a_seed_is_a_non_negative_int(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="seed: expected a non-negative int or None"):
            rl.RolloutBuffer(2, 2, obs=1, action=1, seed=wrong)

    @pytest.mark.parametrize("name", ["obs", "reward", "mask", "index", "advantage", "return"])
    def test_extra_cannot_take_a_reserved_name(self, name: str) -> None:
        with pytest.raises(rl.SchemaError, match=f"extra: expected names that are not reserved, got '{name}'"):
            rl.RolloutBuffer(2, 2, obs=1, action=1, extra={name: 1})

    def test_a_reward_that_is_no_number_is_refused(self) -> None:
        for wrong, where in ((rl.Field((), torch.int64), "reward"), ({"a": rl.Field((), torch.bool)}, "reward.a")):
            with pytest.raises(rl.SchemaError, match=f"^{where}: expected a floating-point field"):
                rl.RolloutBuffer(2, 2, obs=1, action=1, reward=wrong)


class TestStaging:
    def test_a_staged_observation_survives_an_environment_that_reuses_its_memory(self, backend: str) -> None:
        rollout = make(filled=0)
        obs = np.zeros((N, 2), np.float32)
        for t in range(4):
            obs[:] = t
            rollout.stage(obs=obs, action=np.full(N, t))
            rollout.stage(value=np.full(N, 10.0 * t))
            obs[:] = 99
            rollout.add(reward=np.zeros(N), terminated=np.zeros(N, bool), truncated=np.zeros(N, bool))
        assert rollout["obs"][:, 0, 0].tolist() == [0, 1, 2, 3]
        assert rollout["value"][:, 0].tolist() == [0, 10, 20, 30]
        rollout.compute_advantage(np.zeros(N))

    def test_a_field_given_twice_is_refused_and_nothing_changes(self) -> None:
        rollout = make(filled=1)
        rollout.stage(obs=np.full((N, 2), 1.0))
        with pytest.raises(rl.SchemaError, match="obs: expected one value per step, got a second value"):
            rollout.add(**step(7))
        with pytest.raises(rl.SchemaError, match="obs: expected one value per step, got a second value"):
            rollout.stage(obs=np.full((N, 2), 8.0))
        rollout.add(**step(1, obs=None))
        assert rollout["obs"][1].tolist() == [[1.0, 1.0]] * N

    def test_a_stage_that_is_refused_stages_nothing(self) -> None:
        rollout = make(filled=0)
        with pytest.raises(rl.SchemaError, match="^action: expected shape"):
            rollout.stage(obs=np.zeros((N, 2)), action=np.zeros((N, 1), int))
        with pytest.raises(rl.SchemaError, match="^nonsense: expected a declared field"):
            rollout.stage(nonsense=1)
        rollout.add(**step(0))

    def test_add_step_completes_a_staged_step(self) -> None:
        envs = gym.make_vec("CartPole-v1", 2)
        rollout = rl.RolloutBuffer.for_env(envs, 3)
        obs, _ = envs.reset(seed=0)
        for _ in range(3):
            rollout.stage(obs=obs, action=np.ones(2, int))
            before = obs.copy()
            taken = envs.step(np.ones(2, int))
            rollout.add_step(step=taken)
            assert np.allclose(rollout["obs"][-1].numpy(), before)
            obs = taken[0]


class TestAdvantage:
    def test_needs_a_value_at_every_step(self) -> None:
        rollout = make(filled=0)
        for t in range(3):
            rollout.add(**step(t, value=None))
        with pytest.raises(rl.NotReadyError, match="a value at 3 steps, got none. Pass value= to every add"):
            rollout.compute_advantage(np.zeros(N))

    def test_an_empty_rollout_is_not_ready(self) -> None:
        rollout = make(filled=0)
        for call in (
            lambda: rollout.compute_advantage(np.zeros(N)),
            lambda: rollout.minibatches(2),
            lambda: rollout.data,
            rollout.env_major,
            lambda: rollout.attach(x=torch.zeros(0, N)),
        ):
            with pytest.raises(rl.NotReadyError, match="expected at least 1 stored step, got 0"):
                call()
        assert len(rollout) == 0

    def test_a_truncated_step_without_its_final_observation_says_what_to_pass(self) -> None:
        rollout = make(filled=1)
        rollout.add(**step(1, truncated=np.array([False, True, False])))
        with pytest.raises(rl.NotReadyError, match="final_obs of step 1, environment 1: .*Pass final_obs= to add"):
            rollout.compute_advantage(np.zeros(N))
        rollout.compute_advantage(np.zeros(N), bootstrap_truncated=False, gamma=1.0, lam=1.0)
        assert rollout["return"].tolist() == [[0 + 10, 1 + 11, 2 + 12], [10, 11, 12]]

    def test_final_values_are_asked_for_by_number(self) -> None:
        rollout = make(filled=0)
        finals = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
        rollout.add(**step(0, truncated=np.array([True, False, True])), final_obs=finals)
        rollout.add(**step(1))
        assert rollout.final_obs.tolist() == [[0, 1], [4, 5]]
        with pytest.raises(rl.NotReadyError, match=r"2 truncated steps.*Pass final_value=critic\(rollout.final_obs\)"):
            rollout.compute_advantage(np.zeros(N))
        with pytest.raises(rl.SchemaError, match=r"final_value: expected shape \(2,\)"):
            rollout.compute_advantage(np.zeros(N), final_value=np.zeros(3))
        rollout.compute_advantage(np.zeros(N), final_value=[100.0, 200.0], gamma=1.0, lam=1.0)
        assert rollout["return"].tolist() == [[0 + 100, 1 + 11, 2 + 200], [10, 11, 12]]

    def test_a_step_that_is_both_counts_as_terminated_and_needs_no_final_value(self) -> None:
        both = np.array([True, True, True])
        rollout = make(filled=0)
        rollout.add(**step(0, terminated=both, truncated=both), final_obs=np.zeros((N, 2)))
        assert len(rollout.final_obs) == 0
        rollout.compute_advantage(np.full(N, 50.0), gamma=1.0, lam=1.0)
        assert rollout["return"].tolist() == [[0, 1, 2]]

    def test_superfluous_final_values_are_refused(self) -> None:
        rollout = make()
        for wrong in ([1.0], 0.0, torch.tensor(0.0), torch.zeros(0, 7)):
            with pytest.raises(rl.SchemaError, match=r"final_value: expected shape \(0,\)"):
                rollout.compute_advantage(np.zeros(N), final_value=wrong)
        with pytest.raises(rl.SchemaError, match="final_value: expected None with bootstrap_truncated=False"):
            rollout.compute_advantage(np.zeros(N), final_value=[1.0], bootstrap_truncated=False)
        rollout.compute_advantage(np.zeros(N), final_value=torch.zeros(0))

    @pytest.mark.parametrize("wrong", [{"gamma": 1.5}, {"gamma": -0.1}, {"lam": 2.0}, {"lam": float("nan")}])
    def test_rates_outside_their_range_are_refused_and_nothing_changes(self, wrong: dict[str, Any]) -> None:
        rollout = make()
        rollout.compute_advantage(np.full(N, 3.0))
        before = rollout.env_major().clone()
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rollout.compute_advantage(np.zeros(N), **wrong)
        assert (rollout.env_major() == before).all()

    @pytest.mark.parametrize("wrong", [np.zeros((N, 1)), np.zeros(1), 0.0, np.zeros(N, complex)])
    def test_a_last_value_of_another_shape_is_refused(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="^last_value: expected"):
            make().compute_advantage(wrong)

    def test_a_partial_rollout_bootstraps_after_its_last_stored_step(self, backend: str) -> None:
        rollout = make()
        rollout.clear()
        for t in range(2):
            rollout.add(**step(t))
        rollout.compute_advantage(np.full(N, 1000.0), last_obs=np.full((N, 2), 8.0), gamma=1.0, lam=1.0)
        assert rollout["return"].tolist() == [[1010, 1012, 1014], [1010, 1011, 1012]]
        assert sum(len(batch) for batch in rollout.minibatches(4)) == 2 * N

    def test_a_staged_step_must_be_completed_first(self) -> None:
        rollout = make(filled=2)
        rollout.stage(value=np.zeros(N))
        with pytest.raises(rl.NotReadyError, match="expected complete steps, got a step with staged value"):
            rollout.compute_advantage(np.zeros(N))

    def test_what_was_attached_does_not_outlive_another_step(self) -> None:
        rollout = make(filled=2)
        rollout.compute_advantage(np.zeros(N))
        rollout.add(**step(2))
        assert "advantage" not in rollout.data.keys()


class TestEnvMajor:
    def test_is_the_same_memory_with_the_last_slot(self, backend: str) -> None:
        rollout = make()
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        view = rollout.env_major()
        assert view.batch_size == torch.Size([N, 5])
        assert view["obs"][:, -1].tolist() == [[9.0, 9.0]] * N
        assert view["value"][:, -1].tolist() == [5.0] * N
        assert not view["reward"][:, -1].any()
        assert not view["advantage"][:, -1].any()
        assert view["reward"].data_ptr() == rollout["reward"].data_ptr()
        view["reward"][1, 2] = 77
        assert rollout["reward"][2, 1] == 77

    def test_the_last_slot_is_zero_before_the_advantage_is_computed(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        rollout.clear()
        for t in range(2):
            rollout.add(**step(t + 1))
        assert not rollout.env_major()["obs"][:, -1].any()
        assert not rollout.env_major()["value"][:, -1].any()
        rollout.stage(obs=np.ones((N, 2)))
        with pytest.raises(rl.NotReadyError, match="env_major: expected complete steps"):
            rollout.env_major()

    @pytest.mark.parametrize("mode", [None, "SAME_STEP", "DISABLED"])
    def test_a_refused_step_leaves_the_last_slot_as_it_was(self, mode: str | None) -> None:
        rollout = make(filled=1, autoreset=mode)
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        before = rollout.env_major().clone()
        fields = step(7, truncated=np.array([False, True, False]))
        wrong = np.zeros((N, 3))
        taken = (wrong, *(fields[name] for name in ("reward", "terminated", "truncated")), {"final_obs": wrong})
        refused = pytest.raises(rl.SchemaError, match=r"^final_obs: expected shape \(3, 2\)")
        with refused:
            rollout.add_step(fields["obs"], fields["action"], taken) if mode else rollout.add(**fields, final_obs=wrong)
        assert (rollout.env_major() == before).all()

    def test_the_last_slot_is_never_stale(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        rollout.compute_advantage(np.full(N, 6.0))
        assert not rollout.env_major()["obs"][:, -1].any()
        rollout.clear()
        rollout.add(**step(0))
        rollout.compute_advantage(np.full(N, 7.0))
        view = rollout.env_major()
        assert view.batch_size == torch.Size([N, 2])
        assert view["value"][:, -1].tolist() == [7.0] * N
        assert not view["action"][:, -1].any()


class TestLending:
    @staticmethod
    def write(memory: TensorDict, steps: int) -> None:
        """What a collector does: steps that are recognised, and the last observation and value after them."""
        for t in range(steps):
            for name, value in step(t).items():
                memory[name][:, t] = torch.as_tensor(value)
        memory["obs"][:, steps] = 9
        memory["value"][:, steps] = 5

    @pytest.mark.parametrize("steps", [4, 2])
    def test_steps_written_into_the_memory_are_steps_that_were_added(self, backend: str, steps: int) -> None:
        added, lent = make(filled=steps), make(filled=0)
        self.write(lent.lend(), steps)
        assert lent.num_stored == 0
        lent.take_back(steps)
        assert lent.num_stored == steps
        assert lent.is_full == (steps == 4)
        for rollout in (added, lent):
            rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        assert (lent.data == added.data).all()
        assert (lent.env_major() == added.env_major()).all()
        for a, b in zip(lent.minibatches(5), added.minibatches(5), strict=True):
            assert (a == b).all()

    def test_the_last_slot_is_kept_until_another_step_is_added(self) -> None:
        rollout = make(filled=0)
        self.write(rollout.lend(), 2)
        rollout.take_back(2)
        assert rollout.env_major()["obs"][:, -1].tolist() == [[9.0, 9.0]] * N
        assert rollout.env_major()["value"][:, -1].tolist() == [5.0] * N
        with pytest.raises(rl.SchemaError, match="action"):
            rollout.add(**step(2, action=np.zeros(N + 1)))
        assert rollout.env_major()["obs"][:, -1].tolist() == [[9.0, 9.0]] * N
        rollout.add(**step(2))
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
        assert not rollout.env_major()["obs"][:, -1].any()

    def test_one_environment_keeps_its_last_slot_too(self) -> None:
        rollout = rl.RolloutBuffer(2, None, obs=2, action=())
        rollout.lend()["value"][0, 2] = 5
        rollout.take_back()
        rollout.compute_advantage(5.0, gamma=1.0, lam=1.0)
        assert rollout["advantage"].tolist() == [5.0, 5.0]

    def test_it_is_one_memory_across_rollouts_and_shows_nothing_attached(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.zeros(N))
        first = rollout.lend()
        assert "advantage" not in first.keys()
        assert first["obs"].data_ptr() == rollout["obs"].data_ptr() == rollout.lend()["obs"].data_ptr()
        assert first.batch_size == torch.Size([N, 5])

    def test_taking_back_starts_another_rollout(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.zeros(N))
        batches = rollout.minibatches(4)
        rollout.take_back()
        assert "advantage" not in rollout.data.keys()
        with pytest.raises(rl.NotReadyError, match="a cleared one"):
            next(batches)

    def test_rows_that_only_reset_are_none(self) -> None:
        rollout = make(filled=0, autoreset="NEXT_STEP")
        memory = rollout.lend()
        self.write(memory, 4)
        memory["terminated"][1, 1] = True
        rollout.take_back()
        assert (~rollout["mask"]).nonzero().tolist() == [[2, 1]]
        assert len(rollout) == 4 * N - 1

    def test_statistics_are_told_of_new_steps_once(self) -> None:
        rollout = make(filled=0, autoreset="NEXT_STEP", stats=rl.EpisodeStats(N))
        memory = rollout.lend()
        self.write(memory, 4)
        memory["terminated"][1, 1] = True
        for steps in (1, 2, 2):
            rollout.take_back(steps)
        assert rollout.stats is not None
        assert rollout.stats.episodes()["return"].tolist() == [0.0 + 1 + 11]
        rollout.add(**step(2, terminated=np.array([False, True, True])))
        assert rollout.stats.num_steps == 3 * N - 1
        assert rollout.stats.episodes()["return"].tolist() == [12.0, 2.0 + 12 + 22]

    def test_fields_kept_every_few_steps_cannot_be_lent(self) -> None:
        rollout = make(filled=0, extra={"hidden": rl.Carry(3, every=2)})
        for call in (rollout.lend, rollout.take_back):
            with pytest.raises(rl.SchemaError, match="hidden: expected every=1 in a rollout that is lent, got every=2"):
                call()

    def test_no_rows_are_an_empty_rollout(self) -> None:
        rollout = make()
        rollout.take_back(0)
        assert len(rollout) == 0
        rollout.add(**step(3))
        assert rollout["obs"][:, 0, 0].tolist() == [3.0]

    def test_sizes_may_be_numpy_integers(self) -> None:
        rollout = rl.RolloutBuffer(np.int8(127), np.int8(3), obs=1, action=())  # pyright: ignore[reportArgumentType]
        rollout.take_back(np.int64(2))  # pyright: ignore[reportArgumentType]
        assert rollout.num_stored == 2
        rollout.take_back()
        assert rollout.data.shape == (127, 3)

    @pytest.mark.parametrize("wrong", [-1, 5, True, 1.0])
    def test_another_number_of_steps_is_refused(self, wrong: Any) -> None:
        rollout = make(filled=2)
        with pytest.raises(rl.SchemaError, match="^take_back: expected"):
            rollout.take_back(wrong)
        assert rollout.num_stored == 2


class TestMemoryInOtherHands:
    def test_columns_that_were_moved_to_shared_memory_are_found_again(self, backend: str) -> None:
        rollout = make(filled=2)
        rollout.data.share_memory_()
        rollout.add(**step(2))
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
        rollout.add(**step(3))
        batches = rollout.minibatches(4)
        next(batches)
        rollout.data.clone()
        rollout.env_major().share_memory_()
        for batch in batches:
            assert torch.equal(batch["obs"][:, 0], batch["index"] // N)

    def test_statistics_of_lent_rows_that_were_moved_to_shared_memory_are_of_what_was_written_there(self) -> None:
        rollout = make(filled=0, stats=rl.EpisodeStats(N))
        memory = rollout.lend().share_memory_()
        TestLending.write(memory, 4)
        memory["terminated"][:, 3] = True
        rollout.take_back()
        assert rollout.stats is not None
        assert rollout.stats.episodes()["return"].tolist() == [60.0, 64.0, 68.0]

    @pytest.mark.parametrize("num_envs", [N, None])
    def test_rows_written_into_the_columns_are_stored_when_they_are_taken_back(self, num_envs: int | None) -> None:
        theirs, ours = make(filled=0, num_envs=num_envs), make(filled=0, num_envs=num_envs)
        for t in range(3):
            fields = step(t)
            theirs.add(**(fields if num_envs else {name: value[0] for name, value in fields.items()}))
        assert ours.columns.batch_size == ((4, N) if num_envs else (4,))
        ours.columns[:3].update_(theirs.data.exclude("mask"))
        assert ours.num_stored == 0
        ours.take_back(3)
        for rollout in (ours, theirs):
            rollout.compute_advantage(np.zeros(N) if num_envs else 0.0)
        assert (ours.data == theirs.data).all()

    def test_fewer_rows_may_be_taken_back_and_written_behind(self) -> None:
        rollout = make(filled=4)
        rollout.attach(extra=torch.zeros(4, N))
        rollout.take_back(1)
        assert "extra" not in rollout.data.keys()
        rollout.add(**step(7))
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 7.0]
        rollout.take_back(4)
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 7.0, 2.0, 3.0]

    def test_views_of_the_last_slot_may_be_given_for_it(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        view = rollout.env_major()
        rollout.compute_advantage(view["value"][:, -1], last_obs=view["obs"][:, -1], gamma=0.5)
        assert rollout.env_major()["value"][:, -1].tolist() == [5.0] * N
        assert rollout.env_major()["obs"][:, -1].tolist() == [[9.0, 9.0]] * N

    def test_an_environment_that_steps_in_place_is_noticed(self) -> None:
        rollout = make(filled=0, autoreset="DISABLED")
        fields = step(0)
        for obs in (np.zeros((N, 2), np.float32), torch.zeros(N, 2)):
            taken = (obs, fields["reward"], fields["terminated"], fields["truncated"], {})
            with pytest.raises(
                rl.SchemaError, match="next_obs: expected memory apart from obs, got memory shared with obs.*stage"
            ):
                rollout.add_step(obs, fields["action"], taken)
        obs = np.zeros((N, 2), np.float32)
        rollout.stage(obs=obs)
        obs += 1
        rollout.add_step(
            action=fields["action"], step=(obs, fields["reward"], fields["terminated"], fields["truncated"], {})
        )
        assert not rollout["obs"].any()

    def test_out_may_not_be_the_rollout_itself(self) -> None:
        rollout = make()
        out = next(rollout.minibatches(3))
        out["obs"] = rollout.data["obs"][0]
        with pytest.raises(rl.SchemaError, match="out: expected memory outside the rollout, got memory of the rollout"):
            rollout.minibatches(3, out=out)
        with pytest.raises(rl.SchemaError, match="out: expected no device= together with out="):
            rollout.minibatches(3, out=out.clone(), device="cpu")
        with pytest.raises(rl.SchemaError, match=r"out\..*: expected contiguous .* on cpu"):
            rollout.minibatches(3, out=out.to("meta"))


class TestAttach:
    def test_attached_tensors_join_every_batch_until_clear(self, backend: str) -> None:
        rollout = make()
        rollout.attach({"return": torch.arange(4 * N).view(4, N)}, weights=np.ones((4, N, 5)))
        for batch in rollout.minibatches(5):
            assert torch.equal(batch["return"], batch["index"])
            assert batch["weights"].shape == (len(batch), 5)
        rollout.clear()
        rollout.add(**step(0))
        assert "return" not in next(rollout.minibatches(1)).keys()

    def test_can_be_replaced_by_what_is_computed_from_them(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.zeros(N))
        rollout.attach(advantage=rl.normalize(rollout["advantage"]))
        assert abs(float(rollout["advantage"].mean())) < 1e-6

    @pytest.mark.parametrize("name", ["obs", "mask", "index", "log_prob"])
    def test_stored_names_are_refused(self, name: str) -> None:
        with pytest.raises(rl.SchemaError, match=f"^attach: expected an unused name, got {name!r}"):
            make().attach({name: torch.zeros(4, N)})

    def test_takes_what_add_takes(self) -> None:
        rollout = make()
        fixed = np.ones((4, N))
        fixed.flags.writeable = False
        rollout.attach(a=np.ones((4, N))[::-1], b=np.ones((4, N), ">f4"), c=fixed, d=[[1] * N] * 4)
        assert rollout["b"].dtype == torch.float32
        wrongs: list[Any] = [None, "abc", [[1.0], [1.0, 2.0]]]
        for wrong in wrongs:
            with pytest.raises(rl.SchemaError, match="^x: expected"):
                rollout.attach(x=wrong)
        with pytest.raises(rl.SchemaError, match="^attach: expected an unused name, got 'x'"):
            rollout.attach({"x": fixed}, x=fixed)

    @pytest.mark.parametrize("shape", [(N, 4), (4,), (3, N), (4, 1), ()])
    def test_other_leading_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        rollout = make()
        with pytest.raises(rl.SchemaError, match="^x: expected shape"):
            rollout.attach(good=torch.zeros(4, N), x=torch.zeros(shape))
        assert "good" not in rollout.data.keys()


class TestMinibatches:
    @settings(max_examples=40, deadline=None)
    @given(
        steps=st.integers(1, 6),
        envs=st.integers(1, 4),
        size=st.integers(1, 30),
        epochs=st.integers(1, 3),
        drop_last=st.booleans(),
        shuffle=st.booleans(),
    )
    def test_every_row_once_an_epoch_in_exact_sizes(
        self, steps: int, envs: int, size: int, epochs: int, drop_last: bool, shuffle: bool
    ) -> None:
        rollout = make(steps, num_envs=envs, filled=0)
        for t in range(steps):
            rollout.add(**step(t, n=envs))
        total = steps * envs
        options = {"epochs": epochs, "drop_last": drop_last, "shuffle": shuffle}
        if drop_last and total < size:
            with pytest.raises(rl.NotReadyError, match=f"expected {size} transitions, got {total}"):
                rollout.minibatches(size, **options)
            return
        batches = list(rollout.minibatches(size, **options))
        per_epoch = total // size if drop_last else -(-total // size)
        assert len(batches) == epochs * per_epoch
        for epoch in range(epochs):
            mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert [len(b) for b in mine[:-1]] == [size] * (per_epoch - 1)
            index = torch.cat([b["index"] for b in mine])
            assert len(set(index.tolist())) == len(index)
            assert len(index) == (total - total % size if drop_last else total)
            if not shuffle:
                assert index.tolist() == sorted(index.tolist())
            for batch in mine:
                assert torch.equal(batch["obs"][:, 0], batch["index"] // envs)
                assert torch.equal(batch["reward"], 10.0 * (batch["index"] // envs) + batch["index"] % envs)

    def test_order_is_uniform(self) -> None:
        rollout = make(1, num_envs=4, filled=0)
        rollout.add(**step(0, n=4))
        seen: dict[tuple[int, ...], int] = {}
        for batch in rollout.minibatches(4, epochs=24 * 200):
            order = tuple(batch["index"].tolist())
            seen[order] = seen.get(order, 0) + 1
        assert len(seen) == 24
        chi_squared = sum((count - 200) ** 2 / 200 for count in seen.values())
        assert chi_squared < 49.7  # 23 degrees of freedom, p = 0.001

    def test_fields_says_what_is_read(self, backend: str) -> None:
        rollout = make(extra={"e": {"a": (), "b": ()}}, filled=0)
        rollout.add(**step(0), e={"a": np.zeros(N), "b": np.ones(N)})
        batch = next(rollout.minibatches(2, fields=["action", ("e", "b")]))
        assert set(batch.keys(True, True)) == {"action", ("e", "b")}
        assert set(next(rollout.minibatches(2, fields=("e",)))["e"].keys()) == {"a", "b"}
        with pytest.raises(rl.SchemaError, match=r"fields: expected stored fields \(.*\), got e\.c"):
            rollout.minibatches(2, fields=[("e", "c")])

    def test_out_is_filled_and_returned(self, backend: str) -> None:
        rollout = make()
        out = next(rollout.minibatches(4))
        address = out["obs"].data_ptr()
        seen = []
        for batch in rollout.minibatches(4, out=out):
            assert batch is out
            assert batch["obs"].data_ptr() == address
            assert torch.equal(batch["obs"][:, 0], batch["index"] // N)
            seen += batch["index"].tolist()
        assert sorted(seen) == list(range(4 * N))

    def test_an_out_that_does_not_fit_is_refused(self) -> None:
        rollout = make()
        out = next(rollout.minibatches(4))
        with pytest.raises(rl.SchemaError, match="out: expected full batches of 5 transitions, got 12 transitions"):
            rollout.minibatches(5, out=next(rollout.minibatches(5)))
        with pytest.raises(rl.SchemaError, match=r"out\.obs: expected contiguous torch.float32 of shape \(6, 2\)"):
            rollout.minibatches(6, out=out)
        with pytest.raises(rl.SchemaError, match="out: expected the fields"):
            rollout.minibatches(4, out=out.exclude("obs"))
        with pytest.raises(rl.SchemaError, match=r"out\.obs: expected contiguous"):
            rollout.minibatches(4, out=out.clone().set("obs", torch.zeros(2, 4).T))

    def test_a_rollout_cleared_under_an_iterator_is_noticed(self) -> None:
        rollout = make()
        batches = rollout.minibatches(4)
        next(batches)
        rollout.clear()
        with pytest.raises(
            rl.NotReadyError, match="expected the rollout that the epochs began with, got a cleared one"
        ):
            next(batches)

    def test_a_rollout_cleared_before_the_first_batch_is_noticed_too(self) -> None:
        rollout = make()
        batches = rollout.minibatches(4)
        rollout.clear()
        for t in range(4):
            rollout.add(**step(t + 10))
        with pytest.raises(
            rl.NotReadyError, match="expected the rollout that the epochs began with, got a cleared one"
        ):
            next(batches)

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None])
    def test_sizes_are_checked_at_the_call(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="batch_size: expected a positive int"):
            make().minibatches(wrong)
        with pytest.raises(rl.SchemaError, match="epochs: expected a positive int"):
            make().minibatches(2, epochs=wrong)

    def test_device_moves_the_batch(self) -> None:
        batch = next(make().minibatches(4, device="meta"))
        assert isinstance(batch, TensorDict)
        assert batch["obs"].device.type == "meta"


class TestReading:
    def test_a_field_by_name_or_path(self) -> None:
        rollout = make(filled=0, extra={"e": {"a": ()}})
        rollout.add(**step(0), e={"a": np.ones(N)})
        assert rollout["e", "a"].tolist() == [[1.0] * N]
        assert rollout["e"]["a"].tolist() == [[1.0] * N]
        with pytest.raises(KeyError, match="expected one of .*action"):
            rollout["actions"]

    @pytest.mark.parametrize("num_envs", [N, None])
    def test_the_whole_memory_is_there_from_the_start(self, num_envs: int | None) -> None:
        rollout = rl.RolloutBuffer(4, num_envs, obs={"a": 2}, action=())
        lead = (4,) if num_envs is None else (4, num_envs)
        assert rollout.columns["obs", "a"].shape == (*lead, 2)
        assert rollout.columns.batch_size == lead
        fields = {"obs": {"a": np.ones((*lead[1:], 2))}, **dict.fromkeys(("action", "reward"), np.ones(lead[1:]))}
        flags = dict.fromkeys(("terminated", "truncated"), np.zeros(lead[1:], bool))
        rollout.add(**fields, **flags)
        rollout.attach(mine=np.full((1, *lead[1:]), 3.0))
        columns = rollout.columns
        assert columns["reward"].sum() == (num_envs or 1)
        assert columns["mine"].flatten().tolist() == [3.0] * (num_envs or 1) + [0.0] * 3 * (num_envs or 1)
        columns["obs", "a"][0] = 7
        assert rollout["obs", "a"].eq(7).all()

    def test_repr_says_what_is_in_it(self) -> None:
        assert repr(make(filled=2)).startswith("RolloutBuffer(2 of 4 steps, num_envs=3, fields=(obs, action,")


class TestForEnv:
    def test_takes_everything_from_a_vector_environment(self) -> None:
        envs = gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")
        rollout = rl.RolloutBuffer.for_env(envs, 5, value=(2,))
        assert rollout.num_envs == 3
        assert rollout.autoreset is AutoresetMode.NEXT_STEP

    def test_a_single_environment_is_reset_by_its_user(self) -> None:
        rollout = rl.RolloutBuffer.for_env(gym.make("CartPole-v1"), 5)
        assert rollout.num_envs is None
        assert rollout.autoreset is AutoresetMode.DISABLED

    def test_an_autoreset_wrapper_is_seen(self) -> None:
        env = gym.wrappers.Autoreset(gym.make("CartPole-v1"))
        assert rl.RolloutBuffer.for_env(env, 5).autoreset is AutoresetMode.NEXT_STEP

    def test_a_vector_environment_without_the_metadata_must_be_told(self) -> None:
        envs = gym.make_vec("CartPole-v1", 3)
        envs.metadata = {}
        with pytest.raises(rl.SchemaError, match="Pass autoreset="):
            rl.RolloutBuffer.for_env(envs, 5)
        assert rl.RolloutBuffer.for_env(envs, 5, autoreset="SAME_STEP").autoreset is AutoresetMode.SAME_STEP

    def test_add_step_without_a_mode_names_the_argument(self) -> None:
        with pytest.raises(rl.SchemaError, match="autoreset: .*Pass autoreset= to the buffer"):
            make(filled=0).add_step(None, None, (None, None, None, None, {}))

    @pytest.mark.parametrize("wrong", [(1, 2, 3, 4), [1, 2, 3, 4, {}], None, 5])
    def test_add_step_wants_the_five_tuple(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="step: expected the 5-tuple of env.step"):
            make(filled=0, autoreset="DISABLED").add_step(None, None, wrong)

    def test_an_unknown_mode_is_refused(self) -> None:
        with pytest.raises(rl.SchemaError, match="autoreset: expected one of AutoresetMode.NEXT_STEP"):
            make(autoreset="sometimes")

    def test_final_obs_has_no_meaning_under_next_step(self) -> None:
        with pytest.raises(rl.SchemaError, match="final_obs: expected None under autoreset=NEXT_STEP"):
            make(filled=0, autoreset="NEXT_STEP").add(**step(0), final_obs=np.zeros((N, 2)))

    @pytest.mark.parametrize("mode", ["sync", "async", "vector_entry_point"])
    def test_cartpole_under_every_vectorisation(self, mode: str) -> None:
        envs = gym.make_vec("CartPole-v1", 4, vectorization_mode=mode)
        rollout = rl.RolloutBuffer.for_env(envs, 60)
        obs, _ = envs.reset(seed=0)
        random = np.random.default_rng(0)
        for _ in range(60):
            action = random.integers(0, 2, 4)
            taken = envs.step(action)
            rollout.add_step(obs, action, taken, value=np.zeros(4))
            obs = taken[0]
        envs.close()
        rollout.compute_advantage(np.zeros(4), final_value=np.zeros(len(rollout.final_obs)))
        data = rollout.data
        ended = (data["terminated"] | data["truncated"])[:-1]
        assert ended.any()
        if rollout.autoreset is AutoresetMode.NEXT_STEP:
            assert torch.equal(~data["mask"][1:], ended)
            assert not data["reward"][~data["mask"]].any()
        assert len(rollout) == int(data["mask"].sum())


LAYOUTS = (
    "objects",
    "the older name",
    "objects without a mask",
    "batched with a mask",
    "batched with a mask that is a tensor",
    "a batched tensor without a mask",
    "a list",
)


class TestFinalObservationsInTheWild:
    """Layouts of info["final_obs"] under SAME_STEP that libraries really use."""

    finals = np.arange(2.0 * N).reshape(N, 2)

    def layouts(self) -> dict[str, dict[str, Any]]:
        objects = np.empty(N, object)
        objects[1] = self.finals[1]
        some = np.array([False, True, False])
        return {
            "objects": {"final_obs": objects, "_final_obs": some},
            "the older name": {"final_observation": objects, "_final_observation": some},
            "objects without a mask": {"final_obs": objects},
            "batched with a mask": {"final_obs": self.finals, "_final_obs": some},
            "batched with a mask that is a tensor": {"final_obs": self.finals, "_final_obs": torch.from_numpy(some)},
            "a batched tensor without a mask": {"final_obs": torch.from_numpy(self.finals)},
            "a list": {"final_obs": list(objects)},
        }

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_is_found(self, layout: str) -> None:
        rollout = make(filled=0, autoreset="SAME_STEP")
        fields = step(0, truncated=np.array([False, True, False]))
        taken = (np.zeros((N, 2)), fields["reward"], fields["terminated"], fields["truncated"], self.layouts()[layout])
        rollout.add_step(fields["obs"], fields["action"], taken, value=fields["value"])
        assert rollout.final_obs.tolist() == [[2.0, 3.0]]

    def test_batched_dicts_too(self) -> None:
        rollout = rl.RolloutBuffer(1, 2, obs={"a": 1, "b": ()}, action=(), autoreset="SAME_STEP")
        obs = {"a": np.zeros((2, 1)), "b": np.zeros(2)}
        info = {
            "final_obs": {"a": np.array([[1.0], [2.0]]), "b": np.array([3.0, 4.0])},
            "_final_obs": np.array([False, True]),
        }
        following = {name: value + 1 for name, value in obs.items()}
        rollout.add_step(obs, np.zeros(2), (following, np.zeros(2), np.zeros(2, bool), np.array([False, True]), info))
        assert rollout.final_obs["a"].tolist() == [[2.0]]
        assert rollout.final_obs["b"].tolist() == [4.0]

    def test_dicts_with_masks_or_objects_inside_too(self) -> None:
        obs = {"a": np.zeros((2, 1)), "b": np.zeros(2)}
        objects = np.empty((2, 2), object)
        objects[0, 1], objects[1, 1] = np.array([2.0]), 4.0
        some = np.array([False, True])
        for final in (
            {"a": np.array([[1.0], [2.0]]), "b": np.array([3.0, 4.0]), "_a": some, "_b": some},
            {"a": objects[0], "b": objects[1], "_a": some, "_b": some},
        ):
            rollout = rl.RolloutBuffer(1, 2, obs={"a": 1, "b": ()}, action=(), autoreset="SAME_STEP")
            taken = (obs, np.zeros(2), np.zeros(2, bool), some, {"final_obs": final})
            rollout.add_step({"a": np.ones((2, 1)), "b": np.ones(2)}, np.zeros(2), taken)
            assert rollout.final_obs["a"].tolist() == [[2.0]]
            assert rollout.final_obs["b"].tolist() == [4.0]

    def test_one_that_is_missing_is_asked_for(self) -> None:
        rollout = make(filled=0, autoreset="SAME_STEP")
        fields = step(0, truncated=np.array([False, True, False]))
        taken = (np.zeros((N, 2)), fields["reward"], fields["terminated"], fields["truncated"], {})
        rollout.add_step(fields["obs"], fields["action"], taken, value=fields["value"])
        with pytest.raises(rl.NotReadyError, match="final_obs of step 0, environment 1"):
            rollout.compute_advantage(np.zeros(N))

    def test_one_of_a_wrong_shape_is_refused_and_nothing_changes(self) -> None:
        rollout = make(filled=1, autoreset="SAME_STEP")
        before = rollout.data.clone()
        fields = step(1, truncated=np.array([False, True, False]))
        info = {"final_obs": np.zeros((N, 3))}
        taken = (np.zeros((N, 2)), fields["reward"], fields["terminated"], fields["truncated"], info)
        with pytest.raises(rl.SchemaError, match=r"^final_obs: expected shape \(3, 2\)"):
            rollout.add_step(fields["obs"], fields["action"], taken)
        assert (rollout.data == before).all()
        assert rollout.num_stored == 1


class TestOtherDevices:
    def test_the_meta_device_runs_the_whole_cycle_without_reading_data(self) -> None:
        rollout = rl.RolloutBuffer(3, N, obs=2, action=(), device="meta")
        row = {"obs": torch.empty(N, 2), "action": torch.empty(N), "reward": torch.empty(N), "value": torch.empty(N)}
        row = {name: tensor.to("meta") for name, tensor in row.items()}
        flags = torch.empty(N, dtype=torch.bool, device="meta")
        for _ in range(3):
            rollout.add(**row, terminated=flags, truncated=flags)
        rollout.compute_advantage(np.zeros(N), last_obs=np.zeros((N, 2)), bootstrap_truncated=False)
        assert rollout["advantage"].shape == (3, N)
        assert rollout["advantage"].device.type == "meta"

    def test_a_tensor_of_another_device_is_refused(self) -> None:
        rollout = rl.RolloutBuffer(3, N, obs=2, action=(), device="meta")
        with pytest.raises(rl.SchemaError, match="obs: expected a tensor on meta, got cpu"):
            rollout.add(**{name: torch.as_tensor(value) for name, value in step(0).items()})


class TestInferenceMode:
    def test_a_buffer_made_and_filled_in_it_goes_on_outside(self, backend: str) -> None:
        with torch.inference_mode():
            rollout = make(filled=4, autoreset="NEXT_STEP", stats=rl.EpisodeStats(N))
        rollout.clear()
        rollout.add(**step(1))
        assert rollout["obs"][:, 0, 0].tolist() == [1.0]


class TestThreadsAndProcesses:
    def test_threads_may_add_at_the_same_time(self) -> None:
        rollout = make(400, filled=0)
        threads = [threading.Thread(target=lambda: [rollout.add(**step(7)) for _ in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rollout.is_full
        assert torch.equal(rollout["obs"], torch.full((400, N, 2), 7.0))

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking a process with threads is the point here
    def test_a_forked_child_is_told_not_to_use_it(self) -> None:
        rollout = make(filled=1)

        def child(queue: Any) -> None:
            try:
                rollout.add(**step(1))
            except RuntimeError as error:
                queue.put(str(error))

        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert "forked child" in queue.get()
        rollout.add(**step(1))


class TestResetRows:
    def test_a_reset_row_ends_nothing_itself(self) -> None:
        rollout = make(6, filled=0, autoreset="NEXT_STEP")
        ends = np.array([[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]], bool)
        for t in range(6):
            rollout.add(**step(t, terminated=ends[t]))
        expected = [[1, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]]
        assert rollout["mask"].long().tolist() == expected
        rollout.clear()
        rollout.add(**step(0))
        assert rollout["mask"].tolist() == [[True] * N]

    def test_only_the_truncated_rows_of_final_obs_are_read(self) -> None:
        rollout = make(filled=0, obs=rl.Field(2, torch.uint8))
        final = np.full((N, 2), -1)
        final[1] = 7
        fields = step(0, obs=np.zeros((N, 2), np.uint8), truncated=np.array([False, True, False]))
        rollout.add(**fields, final_obs=final)
        assert rollout.final_obs.tolist() == [[7, 7]]


class TestStatistics:
    def test_that_fail_leave_the_last_slot_as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = rl.EpisodeStats(N)
        rollout = make(filled=0, stats=stats)
        rollout.add(**step(0))
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        before = rollout.env_major().clone()
        monkeypatch.setattr(stats, "update", lambda *_, **__: 1 / 0)
        with pytest.raises(ArithmeticError):
            rollout.add(**step(7))
        assert (rollout.env_major() == before).all()

    def test_that_fail_leave_what_was_staged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = rl.EpisodeStats(N)
        rollout = make(filled=0, stats=stats)
        rollout.add(**step(0))
        rollout.compute_advantage(np.full(N, 5.0))
        rest = step(7)
        rollout.stage(obs=rest.pop("obs"))
        monkeypatch.setattr(stats, "update", lambda *_, **__: 1 / 0)
        with pytest.raises(ArithmeticError):
            rollout.add(**rest)
        monkeypatch.undo()
        rollout.add(**rest)
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 7.0]

    @pytest.mark.parametrize("every", [1, 3])
    def test_and_norms_are_told_of_hidden_states_at_every_step(self, backend: str, every: int) -> None:
        stats, norm = rl.EpisodeStats(N, metrics=("energy",)), rl.RunningNorm(2)
        extra = {"hidden": rl.Carry(2, every=every), "energy": rl.Carry(every=every)}
        rollout = make(filled=0, stats=stats, norm={"hidden": norm}, extra=extra)
        for t in range(4):
            ended = np.full(N, t == 3)
            rollout.add(**step(t, terminated=ended), hidden=np.full((N, 2), t), energy=np.full(N, 10.0**t))
        assert stats.episodes()["energy"].tolist() == [1111.0] * N
        assert (norm.count, norm.mean.tolist()) == (4 * N, [1.5, 1.5])

    def test_are_told_of_every_step_and_which_rows_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[tuple[list[float], list[bool]]] = []
        stats = rl.EpisodeStats(N)
        monkeypatch.setattr(
            stats, "update", lambda reward, *_, mask, **__: told.append((reward.tolist(), mask.tolist()))
        )
        rollout = make(filled=0, autoreset="NEXT_STEP", stats=stats)
        rollout.add(**step(0, terminated=np.array([False, True, False])))
        rollout.add(**step(1))
        assert told == [([0.0, 1.0, 2.0], [True] * 3), ([10.0, 11.0, 12.0], [True, False, True])]


def test_a_rollout_tells_what_it_keeps() -> None:
    rollout = rl.RolloutBuffer(num_steps=4, num_envs=3, obs=2, action=())
    kept = 5 * 3 * (8 + 4 + 4 + 1 + 1 + 4 + 4)  # a row more than steps: obs, action, reward, flags, value, log_prob
    assert rollout.nbytes == kept
    rollout.add(np.zeros((3, 2)), np.zeros(3), np.zeros(3), np.zeros(3, bool), np.zeros(3, bool), value=np.zeros(3))
    rollout.compute_advantage(np.zeros(3))
    assert rollout.nbytes == kept + 2 * 5 * 3 * 4


def test_a_kept_leaf_of_a_large_batch_stays_as_it_was_when_the_rest_is_freed() -> None:
    """The memory of freed batches is given to later ones; that of a leaf that somebody has is not."""
    rollout = rl.RolloutBuffer(num_steps=64, num_envs=64, obs=64, action=(), seed=0)
    for t in range(64):
        row = torch.arange(64.0) + 64 * t
        rollout.add(row.unsqueeze(1).expand(64, 64), row, row, row < 0, row < 0)
    batches = enumerate(rollout.minibatches(1024, epochs=4))
    kept = [(batch["obs"], batch["index"].clone()) for i, batch in batches if i % 3]
    assert len(kept) == 10
    for obs, index in kept:
        torch.testing.assert_close(obs, index.float().unsqueeze(1).expand(-1, 64))


class TestRowsThatAllReset:
    """NEXT_STEP, and every environment ended with the last step of the rollout before."""

    @staticmethod
    def reset_only(steps: int = 1) -> rl.RolloutBuffer:
        rollout = make(steps, filled=0, autoreset="NEXT_STEP")
        for t in range(steps):
            rollout.add(**step(t, terminated=np.full(N, t == steps - 1)))
        rollout.clear()
        rollout.add(**step(0))
        return rollout

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_there_is_nothing_to_learn_from(self, backend: str, drop_last: bool) -> None:
        rollout = self.reset_only()
        assert rollout.is_full
        assert len(rollout) == 0
        rollout.compute_advantage(np.zeros(N))
        for shuffle in (False, True):
            options = {"drop_last": drop_last, "shuffle": shuffle, "epochs": 2}
            assert list(rollout.minibatches(4, **options)) == []
            assert list(rollout.minibatches(1, device="cpu", **options)) == []
            for length in (None, 1, 3):
                for layout in ("batch_first", "time_first", "packed"):
                    assert list(rollout.sequences(length, batch_size=2, layout=layout, **options)) == []
                    assert list(rollout.sequences(length, layout=layout, **options)) == []

    def test_out_stays_as_it_was(self) -> None:
        rollout = self.reset_only(2)
        rollout.add(**step(1))
        out = next(rollout.minibatches(N))
        before = out.clone()
        rollout.clear()
        rollout.add(**step(2, terminated=np.ones(N, bool)))
        rollout.clear()
        rollout.add(**step(2))
        assert list(rollout.minibatches(N, out=out)) == []
        assert (out == before).all()

    def test_an_empty_rollout_is_still_not_ready(self) -> None:
        rollout = self.reset_only()
        rollout.clear()
        for read in (lambda: rollout.minibatches(4), rollout.sequences):
            with pytest.raises(rl.NotReadyError, match="expected at least 1 stored step, got 0"):
                read()
