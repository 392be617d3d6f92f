"""Rollouts for all libraries, and the slow float64 reference of their advantages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from relive_conformance.adapters import RolloutShape, Step, Trajectory

Array = np.ndarray[Any, Any]

END_PROBABILITY = 0.01


@dataclass(frozen=True)
class RolloutData:
    """One random rollout: its steps and the inputs of its advantages, sharing memory.

    Episodes only terminate. Libraries bootstrap truncated steps at different places (in the estimator, or in the
    collecting loop by changing the reward), so that truncation would not measure the same work; correctness there
    is the conformance suite's subject.
    """

    shape: RolloutShape
    steps: list[Step]
    trajectory: Trajectory

    def stacked(self, field: str) -> Array:
        """Return all rows [T·N, …] of one field, in time-major order."""
        return np.concatenate([getattr(step, field) for step in self.steps])


def make_rollout(shape: RolloutShape, seed: int) -> RolloutData:
    """Return a rollout with recognisable rows: `obs[t, n, 0]` is t·N + n, exact in float32."""
    rng = np.random.default_rng(seed)
    rows = shape.num_steps, shape.num_envs

    def normal(*size: int) -> Array:
        return rng.standard_normal(size, dtype=np.float32)

    obs = normal(*rows, shape.obs_dim)
    obs[..., 0] = np.arange(rows[0] * rows[1]).reshape(rows)
    columns = {
        "obs": obs,
        "action": normal(*rows, shape.action_dim),
        "reward": normal(*rows),
        "terminated": rng.random(rows) < END_PROBABILITY,
        "truncated": np.zeros(rows, dtype=bool),
        "value": normal(*rows),
        "log_prob": normal(*rows),
    }
    columns["started"] = np.concatenate([np.zeros_like(columns["terminated"][:1]), columns["terminated"][:-1]])
    steps = [Step(**{field.name: columns[field.name][t] for field in fields(Step)}) for t in range(rows[0])]
    trajectory = Trajectory(
        reward=columns["reward"],
        value=columns["value"],
        next_value=np.concatenate([columns["value"][1:], normal(1, rows[1])]),
        terminated=columns["terminated"],
        truncated=columns["truncated"],
    )
    return RolloutData(shape, steps, trajectory)


def reference_gae(trajectory: Trajectory, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Return (advantage, return), float64 [T, N], computed by a loop.

    δ[t] = r[t] + γ (1 − terminated[t]) V(next[t]) − V[t];  A[t] = δ[t] + γ λ (1 − ended[t]) A[t+1]
    """
    reward, value, next_value = (
        getattr(trajectory, name).astype(np.float64) for name in ("reward", "value", "next_value")
    )
    advantage = np.zeros_like(reward)
    following = np.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * ~trajectory.terminated[t] * next_value[t] - value[t]
        following = advantage[t] = delta + gamma * lam * ~trajectory.ended[t] * following
    return advantage, advantage + value
