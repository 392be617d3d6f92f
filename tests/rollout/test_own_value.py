"""Truncated steps of simulators that never reveal the final observation: `bootstrap_truncated="own_value"`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import relive as rl

MODES = [None, "SAME_STEP", "DISABLED"]


def add(rollout: rl.RolloutBuffer, reward: Any, value: Any, terminated: Any, truncated: Any, **more: Any) -> None:
    n = len(reward)
    flags = torch.tensor(terminated, dtype=torch.bool), torch.tensor(truncated, dtype=torch.bool)
    value = torch.as_tensor(value, dtype=torch.float32)
    rollout.add(
        torch.zeros(n, 1), torch.zeros(n), torch.as_tensor(reward, dtype=torch.float32), *flags, value=value, **more
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_value_of_the_steps_own_observation_stands_for_the_next_one(backend: str, mode: Any) -> None:
    rollout = rl.RolloutBuffer(3, 1, obs=1, action=(), autoreset=mode)
    add(rollout, [1], [10], [0], [0])
    add(rollout, [2], [20], [0], [1])
    add(rollout, [3], [30], [0], [0])
    rollout.compute_advantage([40.0], gamma=0.5, lam=0.5, bootstrap_truncated="own_value")
    # δ = [1 + .5·20 − 10, 2 + .5·20 − 20, 3 + .5·40 − 30] = [1, −8, −7]; step 1 ends its episode.
    assert rollout["advantage"].flatten().tolist() == [1 + 0.25 * -8, -8, -7]
    assert rollout["return"].flatten().tolist() == [9, 12, 23]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("agents", [(), (2,)])
def test_it_is_what_rsl_rl_computes(backend: str, mode: Any, agents: tuple[int, ...]) -> None:
    steps, envs, gamma, lam = 24, 16, 0.99, 0.95
    random = np.random.default_rng(0)
    reward, value = (random.normal(size=(steps, envs, *agents)).astype(np.float32) for _ in range(2))
    last = random.normal(size=(envs, *agents)).astype(np.float32)
    terminated = random.random((steps, envs)) < 0.1
    time_outs = (random.random((steps, envs)) < 0.2) & ~terminated
    rollout = rl.RolloutBuffer(steps, envs, obs=1, action=(), reward=agents, value=agents, autoreset=mode)
    for t in range(steps):
        rollout.add(np.zeros((envs, 1)), np.zeros(envs), reward[t], terminated[t], time_outs[t], value=value[t])
    rollout.compute_advantage(last, gamma=gamma, lam=lam, bootstrap_truncated="own_value")

    wide = (..., *(None,) * len(agents))
    shaped = reward + gamma * value * time_outs[wide]
    going_on = 1.0 - (terminated | time_outs)[wide]
    advantage, expected = np.zeros((envs, *agents)), np.zeros_like(value)
    for t in reversed(range(steps)):
        next_value = last if t == steps - 1 else value[t + 1]
        delta = shaped[t] + gamma * going_on[t] * next_value - value[t]
        advantage = delta + gamma * lam * going_on[t] * advantage
        expected[t] = advantage
    assert np.allclose(rollout["advantage"].numpy(), expected, atol=1e-5)
    assert np.allclose(rollout["return"].numpy(), expected + value, atol=1e-5)


def test_values_that_are_known_are_used(backend: str) -> None:
    rollout = rl.RolloutBuffer(2, 2, obs=1, action=(), autoreset="SAME_STEP")
    add(rollout, [1, 1], [10, 20], [0, 0], [1, 1], final_obs=torch.ones(2, 1))
    add(rollout, [1, 1], [30, 40], [0, 0], [0, 1])
    assert len(rollout.final_obs) == 2
    with pytest.raises(rl.NotReadyError, match="own_value"):
        rollout.compute_advantage(torch.zeros(2), final_value=[5.0, 6.0])
    options: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "bootstrap_truncated": "own_value"}
    rollout.compute_advantage(torch.full((2,), 7.0), final_value=[5.0, 6.0], **options)
    assert rollout["return"].tolist() == [[1 + 5, 1 + 6], [1 + 7, 1 + 40]]
    rollout.compute_advantage(torch.full((2,), 7.0), **options)
    assert rollout["return"].tolist() == [[1 + 10, 1 + 20], [1 + 7, 1 + 40]]


def test_a_step_that_is_both_counts_as_terminated(backend: str) -> None:
    rollout = rl.RolloutBuffer(1, 1, obs=1, action=())
    add(rollout, [1], [10], [1], [1])
    rollout.compute_advantage([50.0], bootstrap_truncated="own_value")
    assert rollout["return"].tolist() == [[1.0]]


def test_under_next_step_every_next_value_is_known(backend: str) -> None:
    targets = []
    for bootstrap in (True, "own_value"):
        rollout = rl.RolloutBuffer(4, 2, obs=1, action=(), autoreset=AutoresetMode.NEXT_STEP)
        for t in range(4):
            add(rollout, [1, 2], [10 * t, t], [0, 0], [t == 1, t == 3])
        rollout.compute_advantage([5.0, 6.0], bootstrap_truncated=bootstrap)
        targets.append(rollout["return"].tolist())
    assert targets[0] == targets[1]


@pytest.mark.parametrize("wrong", ["own", "", None, 2, 1.0])
def test_another_bootstrap_is_refused_and_nothing_changes(wrong: Any) -> None:
    rollout = rl.RolloutBuffer(1, 1, obs=1, action=())
    add(rollout, [1], [10], [0], [0])
    with pytest.raises(rl.SchemaError, match='^bootstrap_truncated: expected True, False or "own_value", got'):
        rollout.compute_advantage([50.0], bootstrap_truncated=wrong)
    assert "advantage" not in rollout
