"""Environments that are reset without `cut()` cause a `DataWarning`; with `cut()` there is none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import relive as rl

RESTARTED = r"obs: expected steps that start where the step before led, got [\d,]+ without an end .* Call cut\(\) after"


def play(env: Any, buffer: Any, steps: int, obs: Any) -> Any:
    for _ in range(steps):
        action = env.action_space.sample()
        step = env.step(action)
        buffer.add_step(obs, action, step)
        obs = step[0]
    return obs


def made(mode: str, **options: Any) -> tuple[Any, rl.ReplayBuffer]:
    mode_of = {"autoreset_mode": gym.vector.AutoresetMode[mode]}
    env = gym.make_vec("CartPole-v1", 2, "sync", vector_kwargs=mode_of)
    env.action_space.seed(0)
    return env, rl.ReplayBuffer.for_env(env, 1000, stats=rl.EpisodeStats(2), seed=0, **options)


def until_an_end(env: Any, buffer: Any, obs: Any) -> Any:
    ended = False
    while not ended:
        action = env.action_space.sample()
        step = env.step(action)
        buffer.add_step(obs, action, step)
        obs, ended = step[0], bool((step[2] | step[3]).any())
    return obs


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_a_reset_in_the_middle_of_episodes_is_noticed(backend: str, mode: str) -> None:
    env, replay = made(mode)
    play(env, replay, 5, env.reset(seed=0)[0])
    with pytest.warns(rl.DataWarning, match=RESTARTED):
        play(env, replay, 9, env.reset(seed=1)[0])


def test_a_reset_before_a_reset_row_is_noticed_without_statistics(backend: str) -> None:
    env = gym.make_vec("CartPole-v1", 2, "sync")
    env.action_space.seed(0)
    replay = rl.ReplayBuffer.for_env(env, 1000, seed=0)
    until_an_end(env, replay, env.reset(seed=0)[0])
    with pytest.warns(rl.DataWarning, match=RESTARTED):
        play(env, replay, 9, env.reset(seed=1)[0])


def test_a_resumed_run_is_noticed(tmp_path: Path) -> None:
    env, replay = made("NEXT_STEP")
    until_an_end(env, replay, env.reset(seed=0)[0])
    replay.save(tmp_path)
    loaded = rl.load(tmp_path, rl.ReplayBuffer)
    with pytest.warns(rl.DataWarning, match=RESTARTED):
        play(env, loaded, 9, env.reset(seed=1)[0])


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_cut_is_the_remedy(backend: str, mode: str) -> None:
    env, replay = made(mode)
    obs = env.reset(seed=0)[0]
    for seed in range(4):
        obs = play(env, replay, 5, obs)
        until_an_end(env, replay, obs)
        obs = env.reset(seed=seed)[0]
        replay.cut()
    assert replay.stats is not None
    replay.check()


def test_observations_that_are_changed_before_they_are_added_are_no_restarts(backend: str) -> None:
    replay = rl.ReplayBuffer(1000, 1, (), num_envs=2, autoreset="NEXT_STEP", stats=rl.EpisodeStats(2), seed=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for t in range(100):
            obs, end = np.full((2, 1), t / (t + 1), np.float32), np.array([t % 7 == 6] * 2)
            replay.add(obs, np.zeros(2), np.ones(2), end, ~end & False, obs + 10)
    assert not [str(one.message) for one in told if "cut()" in str(one.message)]
