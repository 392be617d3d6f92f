"""rlox: `compute_gae_batched_f32` and `RolloutBatch.sample_minibatches`.

Rows of the estimator are env-major. Rollouts are collected only inside its own loop, which steps the environment, so
there is no rollout `add` to compare; the container that this loop hands to PPO shuffles, and is offered as `epoch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from rlox import compute_gae_batched_f32
from rlox.batch import RolloutBatch

from recollect.conformance.peers.protocol import Array, Batch, Peer, Step, Trajectory


def _env_major(array: Array) -> Array:
    """[T, N] → float32 [N·T], contiguous."""
    return np.ascontiguousarray(array.T, dtype=np.float32).reshape(-1)


class RloxGae:
    """`compute_gae_batched_f32`, all environments in one native call."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        self._shape = trajectory.reward.shape
        reward = _env_major(trajectory.reward_with_truncation_folded_in(gamma))
        value, done = _env_major(trajectory.value), _env_major(trajectory.ended)
        last_value = np.ascontiguousarray(trajectory.last_value)
        num_steps = self._shape[0]
        return lambda: compute_gae_batched_f32(reward, value, done, last_value, num_steps, gamma, lam)

    def read(self, output: Any) -> tuple[Array, Array]:
        num_steps, num_envs = self._shape
        advantage, return_ = (flat.reshape(num_envs, num_steps).T for flat in output)
        return advantage, return_


class RloxEpoch:
    """`RolloutBatch`: shuffles every field once an epoch and hands out slices of that copy."""

    standardizes = False

    def __init__(self, steps: list[Step], advantage: Array, return_: Array) -> None:
        def flat(field: str) -> torch.Tensor:
            stacked = np.stack([getattr(step, field) for step in steps]).astype(np.float32)
            return torch.from_numpy(stacked).flatten(0, 1)

        self._batch = RolloutBatch(
            obs=flat("obs"),
            actions=flat("action"),
            rewards=flat("reward"),
            dones=flat("terminated"),
            log_probs=flat("log_prob"),
            values=flat("value"),
            advantages=torch.from_numpy(advantage.astype(np.float32)).flatten(),
            returns=torch.from_numpy(return_.astype(np.float32)).flatten(),
        )

    def minibatches(self, batch_size: int) -> Iterable[Any]:
        return self._batch.sample_minibatches(batch_size)

    def read(self, batch: RolloutBatch) -> Batch:
        return Batch(batch.obs, batch.actions, batch.values, batch.log_probs, batch.advantages, batch.returns)


def peer() -> Peer:
    """rlox."""
    return Peer("rlox", version("rlox"), gae=RloxGae, epoch=RloxEpoch)
