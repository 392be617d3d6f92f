"""Stable-Baselines3: `RolloutBuffer`.

Its flag is `episode_start`: the episode ended *before* the step it is stored with; the newest end is an argument of
the advantage computation. Truncated steps are bootstrapped by adding γ V(final) to the reward before storing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from recollect.conformance.peers.protocol import Array, Batch, Peer, RolloutShape, Step, Trajectory


def _buffer(shape: RolloutShape) -> RolloutBuffer:
    def box(size: int) -> spaces.Box:
        return spaces.Box(-np.inf, np.inf, (size,), np.float32)

    return RolloutBuffer(
        shape.num_steps, box(shape.obs_dim), box(shape.action_dim), device="cpu", n_envs=shape.num_envs
    )


class SB3Gae:
    """`compute_returns_and_advantage` of a buffer whose columns are already filled."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        buffer = _buffer(RolloutShape(*trajectory.reward.shape, obs_dim=1, action_dim=1))
        buffer.gamma, buffer.gae_lambda = gamma, lam
        buffer.rewards[:] = trajectory.reward_with_truncation_folded_in(gamma)
        buffer.values[:] = trajectory.value
        buffer.episode_starts[1:] = trajectory.ended[:-1]
        last_value, last_done = torch.from_numpy(trajectory.last_value), trajectory.ended[-1]

        def call() -> RolloutBuffer:
            buffer.compute_returns_and_advantage(last_value, last_done)
            return buffer

        return call

    def read(self, output: Any) -> tuple[Array, Array]:
        return output.advantages, output.returns


class SB3Rollout:
    """`RolloutBuffer`: numpy in, except value and log_prob, which it wants as tensors."""

    standardizes = False

    def __init__(self, shape: RolloutShape) -> None:
        self._buffer = _buffer(shape)

    def prepare(self, step: Step) -> Any:
        value, log_prob = torch.from_numpy(step.value), torch.from_numpy(step.log_prob)
        return step.obs, step.action, step.reward, step.started, value, log_prob

    def add(self, prepared: Any) -> None:
        self._buffer.add(*prepared)

    def advantage(self, last_value: torch.Tensor, last_done: Array, *, gamma: float, lam: float) -> Any:
        self._buffer.gamma, self._buffer.gae_lambda = gamma, lam
        self._buffer.compute_returns_and_advantage(last_value, last_done)

    def minibatches(self, batch_size: int) -> Iterable[Any]:
        return self._buffer.get(batch_size)

    def read(self, batch: RolloutBufferSamples) -> Batch:
        return Batch(
            obs=batch.observations,
            action=batch.actions,
            value=batch.old_values,
            log_prob=batch.old_log_prob,
            advantage=batch.advantages,
            return_=batch.returns,
        )

    def clear(self) -> None:
        self._buffer.reset()


def peer() -> Peer:
    """Stable-Baselines3."""
    return Peer("Stable-Baselines3", version("stable_baselines3"), gae=SB3Gae, rollout=SB3Rollout)
