# pyright: reportMissingImports=false
"""The calls of Stable-Baselines3's training loops, for DQN, SAC and TD3, for n steps, for HER, and for PPO and A2C."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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
    found = []
    for name, (kind, given, rows, options) in replays.items():
        for call, verb in ((_prepare_add, "add"), (_prepare_sample, "sample")):
            found.append(
                _case(f"{name} {verb}", kind, lambda owner, g=given, r=rows, o=options: _replay(owner, g, r, o), call)
            )
    for call, verb in ((_prepare_add, "add"), (_prepare_sample, "sample")):
        found.append(
            Case(
                f"hindsight {verb}",
                lambda c=call: c(_hindsight(OurHindsight)),
                lambda c=call: c(_hindsight(TheirHindsight)),
            )
        )
    rollouts = {"rollout": ("RolloutBuffer", vector), "dict rollout": ("DictRolloutBuffer", goals)}
    calls = {"reset and add": _stepping, "compute_returns_and_advantage": _prepare_estimate, "get": _prepare_iteration}
    for name, (kind, given) in rollouts.items():
        for verb, call in calls.items():
            found.append(_case(f"{name} {verb}", kind, lambda owner, g=given: _rollout(owner, g), call))
    return found


def _case(name: str, kind: str, make: Callable[[Any], Any], call: Callable[[Any], Call]) -> Case:
    ours, theirs = getattr(our_buffers, kind), getattr(their_buffers, kind)
    return Case(name, lambda: call(make(ours)), lambda: call(make(theirs)))


def _drawn(space: spaces.Space[Any], random: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _drawn(part, random) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return random.integers(int(space.n), size=ENVS)
    if space.dtype == np.uint8:
        return random.integers(256, size=(ENVS, *(space.shape or ())), dtype=np.uint8)
    return random.normal(size=(ENVS, *(space.shape or ()))).astype(np.float32)


def _steps(given: Any, count: int) -> list[Any]:
    """Consecutive steps: each observation is the next observation of the step before."""
    random, (obs_space, action_space) = np.random.default_rng(0), given
    infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]
    observations = [_drawn(obs_space, random) for _ in range(count + 1)]
    return [
        (obs, after, _drawn(action_space, random), random.normal(size=ENVS).astype(np.float32),
         random.random(ENVS) < 0.005, infos)
        for obs, after in itertools.pairwise(observations)
    ]  # fmt: skip


class _Filled:
    """A full buffer, and the steps to add next."""

    def __init__(self, buffer: Any, steps: list[Any]) -> None:
        self.buffer, self.steps = buffer, steps
        for number in range(buffer.buffer_size):
            buffer.add(*steps[number % len(steps)])


def _replay(owner: Any, given: Any, rows: int, options: dict[str, Any]) -> _Filled:
    return _Filled(owner(rows, *given, device="cpu", n_envs=ENVS, **options), _steps(given, 64))


def _hindsight(owner: Any) -> _Filled:
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=8, continuous=True, max_steps=20), ENVS)
    buffer = owner(ROWS, env.observation_space, env.action_space, env, device="cpu", n_envs=ENVS)
    obs: Any = env.reset()
    after: Any
    steps, random = [], np.random.default_rng(0)
    for _ in range(200):
        action = random.normal(size=(ENVS, 8)).astype(np.float32)
        after, reward, done, infos = env.step(action)
        steps.append(
            (
                {k: v.copy() for k, v in obs.items()},
                {k: v.copy() for k, v in after.items()},
                action,
                reward,
                done,
                infos,
            )
        )
        obs = after
    return _Filled(buffer, steps)


def _prepare_add(filled: _Filled) -> Call:
    number, steps, buffer = iter(range(2**62)), filled.steps, filled.buffer
    return lambda: buffer.add(*steps[next(number) % len(steps)])


def _prepare_sample(filled: _Filled) -> Call:
    return lambda: filled.buffer.sample(BATCH)


def _rollout(owner: Any, given: Any) -> Any:
    buffer = owner(STEPS, *given, device="cpu", n_envs=ENVS, gae_lambda=0.95)
    _stepping(buffer)()
    _prepare_estimate(buffer)()
    return buffer


def _stepping(buffer: Any) -> Call:
    """Return one rollout, as `collect_rollouts` stores it."""
    value, log_prob = torch.randn(ENVS, 1), torch.randn(ENVS)
    steps = _steps((buffer.observation_space, buffer.action_space), STEPS)

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
