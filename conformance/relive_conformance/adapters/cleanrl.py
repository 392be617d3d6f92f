"""CleanRL's pattern, which is not a package but a style: plain torch tensors in the training script.

Tensors of [T, N, …] are written row by row, a loop over time computes advantages, and each epoch indexes flattened
tensors with slices of one shuffled numpy index. `done[t]` is true if the episode ended *before* step t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from relive_conformance.adapters.protocol import Adapter, Array, Batch, RolloutShape, Step, Trajectory


def _gae(
    reward: torch.Tensor,
    value: torch.Tensor,
    done: torch.Tensor,
    *,
    last_value: torch.Tensor,
    last_done: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    advantage = torch.zeros_like(reward)
    running: torch.Tensor | float = 0.0
    num_steps = len(reward)
    with torch.no_grad():
        for t in range(num_steps - 1, -1, -1):
            newest = t == num_steps - 1
            alive = 1.0 - (last_done if newest else done[t + 1])
            next_value = last_value if newest else value[t + 1]
            delta = reward[t] + gamma * next_value * alive - value[t]
            running = delta + gamma * lam * alive * running
            advantage[t] = running
        return advantage, advantage + value


class CleanRLGae:
    """The loop over time, with one row of tensor operations per step."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        reward = torch.from_numpy(trajectory.reward_with_truncation_folded_in(gamma))
        value, last_value = torch.from_numpy(trajectory.value), torch.from_numpy(trajectory.last_value)
        ended = torch.from_numpy(trajectory.ended).float()
        done = torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])
        last_done = ended[-1]
        return lambda: _gae(reward, value, done, last_value=last_value, last_done=last_done, gamma=gamma, lam=lam)

    def read(self, output: Any) -> tuple[Array, Array]:
        advantage, return_ = output
        return advantage.numpy(), return_.numpy()


class CleanRLRollout:
    """One tensor per field, and a step counter."""

    standardizes = False

    def __init__(self, shape: RolloutShape) -> None:
        rows = shape.num_steps, shape.num_envs
        self._obs = torch.zeros(*rows, shape.obs_dim)
        self._action = torch.zeros(*rows, shape.action_dim)
        self._reward, self._done, self._value, self._log_prob = (torch.zeros(rows) for _ in range(4))
        self._step = 0
        self._order = np.arange(shape.num_steps * shape.num_envs)
        self._rng = np.random.default_rng(0)
        self._flat: list[torch.Tensor] = []

    def prepare(self, step: Step) -> Any:
        arrays = step.obs, step.action, step.reward, step.started.astype(np.float32), step.value, step.log_prob
        return tuple(torch.from_numpy(array) for array in arrays)

    def add(self, prepared: Any) -> None:
        t = self._step
        self._obs[t], self._action[t], self._reward[t], self._done[t], self._value[t], self._log_prob[t] = prepared
        self._step = t + 1

    def advantage(self, last_value: torch.Tensor, last_done: Array, *, gamma: float, lam: float) -> Any:
        last = torch.from_numpy(last_done).float()
        advantage, return_ = _gae(
            self._reward, self._value, self._done, last_value=last_value, last_done=last, gamma=gamma, lam=lam
        )
        fields = self._obs, self._action, self._value, self._log_prob, advantage, return_
        self._flat = [field.reshape(-1, *field.shape[2:]) for field in fields]

    def minibatches(self, batch_size: int) -> Iterator[Any]:
        self._rng.shuffle(self._order)
        for start in range(0, len(self._order), batch_size):
            index = self._order[start : start + batch_size]
            yield [field[index] for field in self._flat]

    def read(self, batch: Iterable[torch.Tensor]) -> Batch:
        return Batch(*batch)

    def clear(self) -> None:
        self._step = 0


def adapter() -> Adapter:
    """Return the adapter of the pattern; its version is torch's."""
    return Adapter("CleanRL pattern", f"torch {torch.__version__}", gae=CleanRLGae, rollout=CleanRLRollout)
