"""An environment whose numbers say where they come from, and the transitions that it must give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

Script = tuple[tuple[int, str], ...]
"""The episodes of an environment: (length, "terminated", "truncated" or "both"), played in turn again and again."""


class Scripted(gym.Env[np.ndarray, Any]):
    """Observation (environment, episode, step); reward 100·environment + 10·episode + step."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(1000)

    def __init__(self, env: int, script: Script) -> None:
        self.env, self.script = env, script
        self.episode, self.step_count = -1, 0

    def _obs(self) -> np.ndarray:
        return np.array([self.env, self.episode, self.step_count], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.episode, self.step_count = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        length, end = self.script[self.episode % len(self.script)]
        reward = 100.0 * self.env + 10 * self.episode + self.step_count
        self.step_count += 1
        ended = self.step_count == length
        return self._obs(), reward, ended and end != "truncated", ended and end != "terminated", {}


@dataclass(frozen=True)
class Transition:
    obs: tuple[float, ...]
    action: int
    reward: float
    terminated: bool
    truncated: bool
    next_obs: tuple[float, ...]


def act(obs: np.ndarray) -> np.ndarray:
    """Return recognisable actions: 10·episode + step."""
    return (10 * obs[..., 1] + obs[..., 2]).astype(np.int64)


def transitions(env: int, script: Script, count: int) -> list[Transition]:
    """Return the transitions of one environment, stepped by hand without a vector environment or autoreset."""
    world, transitions = Scripted(env, script), []
    obs, _ = world.reset()
    while len(transitions) < count:
        action = int(act(obs))
        next_obs, reward, terminated, truncated, _ = world.step(action)
        transitions.append(Transition(tuple(obs), action, reward, terminated, truncated, tuple(next_obs)))
        obs = world.reset()[0] if terminated or truncated else next_obs
    return transitions


def vector(scripts: list[Script], mode: AutoresetMode) -> SyncVectorEnv:
    makers = [lambda n=n, script=script: Scripted(n, script) for n, script in enumerate(scripts)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def step_and_reset(envs: Any, action: np.ndarray) -> tuple[Any, np.ndarray]:
    """Step; return the result and the next observation. Under DISABLED, reset the ended environments."""
    step = envs.step(action)
    obs, ended = step[0], step[2] | step[3]
    if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
        # The vector environment may return memory that it overwrites later.
        step = (obs.copy(), *step[1:])
        obs, _ = envs.reset(options={"reset_mask": ended})
    return step, obs
