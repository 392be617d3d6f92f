"""recollect through its own public interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import recollect as rc
from recollect.conformance.peers.protocol import Array, Batch, Peer, RolloutShape, Step, Trajectory

FIELDS = ("obs", "action", "value", "log_prob", "advantage", "return")
_STEP_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "value", "log_prob")


class OurGae:
    """`rc.gae` on time-major torch tensors."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        names = ("reward", "value", "next_value", "terminated", "truncated")
        reward, value, next_value, terminated, truncated = (torch.from_numpy(getattr(trajectory, n)) for n in names)
        return lambda: rc.gae(reward, value, next_value, terminated, truncated, gamma=gamma, lam=lam)

    def read(self, output: Any) -> tuple[Array, Array]:
        advantage, return_ = output
        return advantage.numpy(), return_.numpy()


class OurRollout:
    """`rc.RolloutBuffer`, given torch tensors."""

    standardizes = False

    def __init__(self, shape: RolloutShape) -> None:
        self._buffer = rc.RolloutBuffer(shape.num_steps, shape.num_envs, shape.obs_dim, shape.action_dim, seed=0)

    def prepare(self, step: Step) -> Any:
        return tuple(torch.from_numpy(getattr(step, name)) for name in _STEP_FIELDS)

    def add(self, prepared: Any) -> None:
        obs, action, reward, terminated, truncated, value, log_prob = prepared
        self._buffer.add(obs, action, reward, terminated, truncated, value=value, log_prob=log_prob)

    def advantage(self, last_value: torch.Tensor, last_done: Array, *, gamma: float, lam: float) -> Any:
        return self._buffer.compute_advantage(last_value, gamma=gamma, lam=lam)

    def minibatches(self, batch_size: int) -> Iterable[Any]:
        return self._buffer.minibatches(batch_size, fields=FIELDS)

    def read(self, batch: Any) -> Batch:
        return Batch(*(batch[name] for name in FIELDS))

    def clear(self) -> None:
        self._buffer.clear()


class OurRolloutOfNumpy(OurRollout):
    """The same buffer, given numpy arrays."""

    def prepare(self, step: Step) -> Any:
        return tuple(np.ascontiguousarray(getattr(step, name)) for name in _STEP_FIELDS)


def peer() -> Peer:
    """This library."""
    given = {"numpy": OurRolloutOfNumpy}
    return Peer("recollect", version("recollect"), gae=OurGae, rollout=OurRollout, rollout_given=given, ours=True)
