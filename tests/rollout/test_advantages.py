"""Advantages and returns, and the last value and observation after the steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import relive as rl
from tests.rollout.steps import N, make, step


class TestAdvantage:
    def test_needs_a_value_at_every_step(self) -> None:
        rollout = make(count=0)
        for t in range(3):
            rollout.add(**step(t, value=None))
        with pytest.raises(rl.NotReadyError, match="a value at 3 steps, got none. Pass value= to every add"):
            rollout.compute_advantage(np.zeros(N))

    def test_an_empty_rollout_is_not_ready(self) -> None:
        rollout = make(count=0)
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
        rollout = make(count=1)
        rollout.add(**step(1, truncated=np.array([False, True, False])))
        with pytest.raises(rl.NotReadyError, match="final_obs of step 1, environment 1: .*Pass final_obs= to add"):
            rollout.compute_advantage(np.zeros(N))
        rollout.compute_advantage(np.zeros(N), bootstrap_truncated=False, gamma=1.0, lam=1.0)
        assert rollout["return"].tolist() == [[0 + 10, 1 + 11, 2 + 12], [10, 11, 12]]

    def test_final_values_are_asked_for_by_number(self) -> None:
        rollout = make(count=0)
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

    def test_superfluous_final_values_are_refused(self) -> None:
        rollout = make()
        for wrong in ([1.0], 0.0, torch.tensor(0.0), torch.zeros(0, 7)):
            with pytest.raises(rl.SchemaError, match=r"final_value: expected shape \(0,\)"):
                rollout.compute_advantage(np.zeros(N), final_value=wrong)
        with pytest.raises(rl.SchemaError, match="final_value: expected None with bootstrap_truncated=False"):
            rollout.compute_advantage(np.zeros(N), final_value=[1.0], bootstrap_truncated=False)
        rollout.compute_advantage(np.zeros(N), final_value=torch.zeros(0))

    def test_a_staged_step_must_be_completed_first(self) -> None:
        rollout = make(count=2)
        rollout.stage(value=np.zeros(N))
        with pytest.raises(rl.NotReadyError, match="expected complete steps, got a step with staged value"):
            rollout.compute_advantage(np.zeros(N))


class TestEnvMajor:
    def test_env_major_shares_memory_and_has_the_last_slot(self, backend: str) -> None:
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
        rollout = make(count=1, autoreset=mode)
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        before = rollout.env_major().clone()
        fields = step(7, truncated=np.array([False, True, False]))
        wrong = np.zeros((N, 3))
        taken = (
            wrong,
            *(fields[name] for name in ("reward", "terminated", "truncated")),
            {"final_obs": wrong} if mode == "SAME_STEP" else {},
        )
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
