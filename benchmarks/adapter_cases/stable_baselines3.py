# pyright: reportMissingImports=false
"""The calls of Stable-Baselines3's training loops: DQN, SAC, TD3, n steps, HER, PPO and A2C."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import stable_baselines3.common.buffers as their_buffers
import torch
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer as TheirHindsight
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv

import relive.compat.stable_baselines3.common.buffers as our_buffers
from relive.compat.stable_baselines3 import HerReplayBuffer as OurHindsight

from . import Case

OBS, ACTIONS = spaces.Box(-9, 9, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32)
IMAGE, BUTTONS = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6)
GOALS = spaces.Dict({"observation": OBS, "achieved_goal": ACTIONS, "desired_goal": ACTIONS})
ENVS, ROWS, BATCH, STEPS = 4, 20_000, 256, 128

Call = Callable[[], Any]


def cases() -> list[Case]:
    """Return every call with the set-up of both sides."""
    vector, image, goals = (OBS, ACTIONS), (IMAGE, BUTTONS), (GOALS, ACTIONS)
    replays = {
        "replay": ("ReplayBuffer", vector, ROWS, {}),
        "image replay": ("ReplayBuffer", image, 400, {}),
        "dict replay": ("DictReplayBuffer", goals, ROWS, {}),
        "n-step replay": ("NStepReplayBuffer", vector, ROWS, {"n_steps": 3}),
    }
    rollouts = {"rollout": ("RolloutBuffer", vector), "dict rollout": ("DictRolloutBuffer", goals)}
    replay_calls = {"add": _prepare_add, "sample": _prepare_sample}
    rollout_calls = {
        "reset and add": _prepare_steps, "compute_returns_and_advantage": _prepare_estimate, "get": _prepare_iteration,
    }  # fmt: skip
    replay_cases = [
        _make_case(f"{name} {verb}", _find_kinds(kind), partial(_fill_replay, pair, rows, options), call)
        for name, (kind, pair, rows, options) in replays.items()
        for verb, call in replay_calls.items()
    ]
    hindsight_cases = [
        _make_case(f"hindsight {verb}", (OurHindsight, TheirHindsight), _fill_hindsight, call)
        for verb, call in replay_calls.items()
    ]
    rollout_cases = [
        _make_case(f"{name} {verb}", _find_kinds(kind), partial(_fill_rollout, pair), call)
        for name, (kind, pair) in rollouts.items()
        for verb, call in rollout_calls.items()
    ]
    return [*replay_cases, *hindsight_cases, *rollout_cases]


def _find_kinds(kind: str) -> tuple[Any, Any]:
    """Return our class of this name, and Stable-Baselines3's."""
    return getattr(our_buffers, kind), getattr(their_buffers, kind)


def _make_case(name: str, kinds: tuple[Any, Any], fill: Callable[[Any], Any], call: Callable[[Any], Call]) -> Case:
    ours, theirs = kinds
    return Case(name, lambda: call(fill(ours)), lambda: call(fill(theirs)))


def _draw(space: spaces.Space[Any], random: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _draw(part, random) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return random.integers(int(space.n), size=ENVS)
    if space.dtype == np.uint8:
        return random.integers(256, size=(ENVS, *(space.shape or ())), dtype=np.uint8)
    return random.normal(size=(ENVS, *(space.shape or ()))).astype(np.float32)


def _make_steps(space_pair: Any, count: int) -> list[Any]:
    """Make consecutive steps: each observation is the next observation of the previous step."""
    random, (obs_space, action_space) = np.random.default_rng(0), space_pair
    infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]
    observations = [_draw(obs_space, random) for _ in range(count + 1)]
    return [
        (obs, next_obs, _draw(action_space, random), random.normal(size=ENVS).astype(np.float32),
         random.random(ENVS) < 0.005, infos)
        for obs, next_obs in itertools.pairwise(observations)
    ]  # fmt: skip


class _FilledBuffer:
    """A full buffer, and steps that can be added to it."""

    def __init__(self, buffer: Any, steps: list[Any]) -> None:
        self.buffer, self.steps = buffer, steps
        for number in range(buffer.buffer_size):
            buffer.add(*steps[number % len(steps)])


def _fill_replay(space_pair: Any, rows: int, options: dict[str, Any], owner: Any) -> _FilledBuffer:
    return _FilledBuffer(owner(rows, *space_pair, device="cpu", n_envs=ENVS, **options), _make_steps(space_pair, 64))


def _fill_hindsight(owner: Any) -> _FilledBuffer:
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=8, continuous=True, max_steps=20), ENVS)
    buffer = owner(ROWS, env.observation_space, env.action_space, env, device="cpu", n_envs=ENVS)
    obs: Any = env.reset()
    next_obs: Any
    steps, random = [], np.random.default_rng(0)
    for _ in range(200):
        action = random.normal(size=(ENVS, 8)).astype(np.float32)
        next_obs, reward, done, infos = env.step(action)
        steps.append(
            (
                {k: v.copy() for k, v in obs.items()},
                {k: v.copy() for k, v in next_obs.items()},
                action,
                reward,
                done,
                infos,
            )
        )
        obs = next_obs
    return _FilledBuffer(buffer, steps)


def _prepare_add(full: _FilledBuffer) -> Call:
    number, steps, buffer = iter(range(2**62)), full.steps, full.buffer
    return lambda: buffer.add(*steps[next(number) % len(steps)])


def _prepare_sample(full: _FilledBuffer) -> Call:
    return lambda: full.buffer.sample(BATCH)


def _fill_rollout(space_pair: Any, owner: Any) -> Any:
    buffer = owner(STEPS, *space_pair, device="cpu", n_envs=ENVS, gae_lambda=0.95)
    _prepare_steps(buffer)()
    _prepare_estimate(buffer)()
    return buffer


def _prepare_steps(buffer: Any) -> Call:
    """Return a call that stores one rollout, as `collect_rollouts` does."""
    value, log_prob = torch.randn(ENVS, 1), torch.randn(ENVS)
    steps = _make_steps((buffer.observation_space, buffer.action_space), STEPS)

    def call() -> None:
        buffer.reset()
        for obs, _, action, reward, done, _ in steps:
            buffer.add(obs, action, reward, done, value, log_prob)

    return call


def _prepare_estimate(buffer: Any) -> Call:
    last, dones = torch.randn(ENVS, 1), np.zeros(ENVS, np.bool_)
    return lambda: buffer.compute_returns_and_advantage(last, dones)


def _prepare_iteration(buffer: Any) -> Call:
    return lambda: list(buffer.get(64))
