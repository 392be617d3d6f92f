"""Tianshou: `VectorReplayBuffer`, `compute_episodic_return` and `Batch.split`.

Rows are env-major: all steps of environment 0, then all of environment 1. It asks for the values of all next states,
multiplies terminated ones by zero, and cuts the chain where an episode ended or a sub-buffer's newest row lies.
Values and log-probabilities are usually computed again before an update; here they travel under its `policy` key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Algorithm, _gae
from tianshou.data import Batch as TianshouBatch
from tianshou.data import VectorReplayBuffer

from recollect.conformance.peers.protocol import Array, Batch, Peer, RolloutShape, Step, Trajectory


def _env_major(array: Array) -> Array:
    """[T, N] → [N·T], contiguous."""
    return np.ascontiguousarray(array.T).reshape(-1)


class TianshouGae:
    """The compiled scan under `compute_episodic_return`, without the buffer look-ups around it."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        self._shape = trajectory.reward.shape
        reward, value = _env_major(trajectory.reward), _env_major(trajectory.value)
        next_value = _env_major(trajectory.next_value * ~trajectory.terminated)
        ended = trajectory.ended.copy()
        ended[-1] = True  # the scan runs through all environments in one go
        end = _env_major(ended)

        def call() -> tuple[Array, Array]:
            advantage = _gae(value, next_value, reward, end, gamma, lam)
            return advantage, advantage + value

        return call

    def read(self, output: Any) -> tuple[Array, Array]:
        num_steps, num_envs = self._shape
        advantage, return_ = (flat.reshape(num_envs, num_steps).T for flat in output)
        return advantage, return_


class TianshouRollout:
    """`VectorReplayBuffer` of N sub-buffers that does not keep a second copy of each observation."""

    standardizes = False

    def __init__(self, shape: RolloutShape) -> None:
        self._shape = shape
        size = shape.num_steps * shape.num_envs
        self._buffer = VectorReplayBuffer(size, shape.num_envs, ignore_obs_next=True)
        self._batch = TianshouBatch()

    def prepare(self, step: Step) -> Any:
        return TianshouBatch(
            obs=step.obs,
            act=step.action,
            rew=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
            policy=TianshouBatch(value=step.value, log_prob=step.log_prob),
        )

    def add(self, prepared: Any) -> None:
        self._buffer.add(prepared)

    def advantage(self, last_value: torch.Tensor, last_done: Array, *, gamma: float, lam: float) -> Any:
        rows, index = self._buffer.sample(0)
        value: Array = rows.policy.value
        per_env = value.reshape(self._shape.num_envs, self._shape.num_steps)
        next_value = np.concatenate([per_env[:, 1:], last_value.numpy()[:, None]], axis=1).reshape(-1)
        return_, advantage = Algorithm.compute_episodic_return(
            rows, self._buffer, index, next_value, value, gamma=gamma, gae_lambda=lam
        )
        self._batch = TianshouBatch(
            obs=torch.from_numpy(rows.obs),
            act=torch.from_numpy(rows.act),
            v_s=torch.from_numpy(value),
            logp_old=torch.from_numpy(rows.policy.log_prob),
            adv=torch.from_numpy(advantage).float(),
            returns=torch.from_numpy(return_).float(),
        )

    def minibatches(self, batch_size: int) -> Iterable[Any]:
        return self._batch.split(batch_size)

    def read(self, batch: Any) -> Batch:
        return Batch(batch.obs, batch.act, batch.v_s, batch.logp_old, batch.adv, batch.returns)

    def clear(self) -> None:
        self._buffer.reset()


def peer() -> Peer:
    """Tianshou."""
    return Peer("Tianshou", version("tianshou"), gae=TianshouGae, rollout=TianshouRollout)
