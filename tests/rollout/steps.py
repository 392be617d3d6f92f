"""Recognisable steps, and rollouts of them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

import relive as rl

N = 3


def step(t: int, *, n: int = N, **changed: Any) -> dict[str, Any]:
    """Return a recognisable step: obs = t, action = t, reward = 10·t + n, value = 10·t."""
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


def make(num_steps: int = 4, *, count: int | None = None, **options: Any) -> rl.RolloutBuffer:
    options = {"obs": 2, "action": gym.spaces.Discrete(9), "num_envs": N, "seed": 0, **options}
    rollout = rl.RolloutBuffer(num_steps, **options)
    for t in range(num_steps if count is None else count):
        rollout.add(**step(t))
    return rollout
