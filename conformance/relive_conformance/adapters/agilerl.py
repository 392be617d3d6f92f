# pyright: reportMissingImports=false
"""AgileRL: `RolloutBuffer`, its chunked sequences, and three replay buffers.

`done` of a step is stored with that step; of replay buffers it is `terminated`, as in its own training loop.

A rollout with recurrent states drops the steps that are left over behind the last full sequence of an episode. Padding
is prepared once a rollout; that is part of an epoch here, since every rollout pays it before its first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from agilerl.components.replay_buffer import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from agilerl.components.rollout_buffer import RolloutBuffer
from agilerl.typing import BPTTSequenceType
from tensordict import TensorDict

from relive_conformance.adapters.off_policy import ALPHA, BETA, ReplayBatch, ReplayShape, Transitions, drop_unit_axis
from relive_conformance.adapters.protocol import Adapter, Array, RolloutShape, Sequences, Step, Trajectory

_LEARNED = ("obs", "action", "reward", "done", "next_obs")


class AgileRlRecurrent:
    """Adapter of the sequences of `RolloutBuffer`: `prepare_sequence_tensors` and `get_minibatch_sequences`."""

    def __init__(self, shape: RolloutShape, length: int) -> None:
        self._shape, self._length = shape, length

    def fill(self, steps: list[Step], state: Array, advantage: Array, return_: Array) -> None:
        shape = self._shape
        self._buffer = RolloutBuffer(
            shape.num_steps,
            gym.spaces.Box(-np.inf, np.inf, (shape.obs_dim,), np.float32),
            gym.spaces.Box(-np.inf, np.inf, (shape.action_dim,), np.float32),
            num_envs=shape.num_envs,
            recurrent=True,
            hidden_state_architecture={"h": (1, shape.num_envs, state.shape[-1])},
            max_seq_len=self._length,
            bptt_sequence_type=BPTTSequenceType.CHUNKED,
        )
        for step, before in zip(steps, state, strict=True):
            ended, hidden = step.terminated | step.truncated, {"h": torch.from_numpy(before).unsqueeze(0)}
            self._buffer.add(step.obs, step.action, step.reward, ended, step.value, step.log_prob, hidden_state=hidden)
        self._buffer.buffer["advantages"] = torch.from_numpy(advantage)
        self._buffer.buffer["returns"] = torch.from_numpy(return_)

    def minibatches(self, num_steps: int) -> Iterable[Any]:
        self._buffer.prepare_sequence_tensors()
        return self._buffer.get_minibatch_sequences(num_steps // self._length)

    def read(self, batch: Any) -> Sequences:
        padded, _ = batch
        state = padded["initial_hidden_states"]["h"].squeeze(1)
        rows = padded["observations"][:, 0].long().view(len(state), -1)
        masks = padded["pad_mask"].view(len(state), -1)
        return Sequences([run[mask].tolist() for run, mask in zip(rows, masks, strict=True)], state.numpy())


class AgileRlGae:
    """Adapter of `compute_returns_and_advantages`, with flags as in AgileRL's own collection loop."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        num_steps, num_envs = trajectory.reward.shape
        box = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        buffer = RolloutBuffer(num_steps, box, box, num_envs=num_envs, gamma=gamma, gae_lambda=lam, use_gae=True)
        reward, zeros = trajectory.reward_with_truncation_folded_in(gamma), np.zeros((num_envs, 1), np.float32)
        for t, ended in enumerate(trajectory.ended):
            buffer.add(zeros, zeros, reward[t], ended, trajectory.value[t], zeros[:, 0])

        def call() -> RolloutBuffer:
            buffer.compute_returns_and_advantages(trajectory.last_value, trajectory.ended[-1])
            return buffer

        return call

    def read(self, output: Any) -> tuple[Array, Array]:
        return output.buffer["advantages"].numpy(), output.buffer["returns"].numpy()


class AgileRlReplay:
    """Adapter of `ReplayBuffer`, which draws without replacement below 16,384 rows; scalars are [B, 1]."""

    draws_from = "draws come from torch's global generator"

    def __init__(self, shape: ReplayShape) -> None:
        self._buffer: Any = self._make(shape)

    def _make(self, shape: ReplayShape) -> Any:
        return ReplayBuffer(shape.capacity)

    def prepare(self, step: Transitions) -> Any:
        arrays = step.obs, step.action, step.reward, step.terminated.astype(np.float32), step.next_obs
        fields = {name: torch.from_numpy(array) for name, array in zip(_LEARNED, arrays, strict=True)}
        return TensorDict(fields, batch_size=[len(step)])

    def raw(self, step: Transitions) -> Any:
        arrays = step.obs, step.action, step.reward, step.terminated, step.next_obs
        fields = {name: torch.as_tensor(array) for name, array in zip(_LEARNED, arrays, strict=True)}
        return TensorDict(fields, batch_size=[len(step.action)])

    def add(self, prepared: Any) -> None:
        self._buffer.add(prepared)

    def fill(self, block: Transitions) -> None:
        self.add(self.prepare(block))

    extend = fill

    def clear(self) -> None:
        self._buffer.clear()

    def sample(self, batch_size: int) -> Any:
        return self._buffer.sample(batch_size)

    def read(self, batch: Any) -> ReplayBatch:
        obs, action, reward, done, next_obs = (batch[name].numpy() for name in _LEARNED)
        return ReplayBatch(obs, action, drop_unit_axis(reward), drop_unit_axis(done), next_obs)

    @property
    def stored(self) -> int:
        return len(self._buffer)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._buffer.storage.values(include_nested=True, leaves_only=True))


class AgileRlPrioritized(AgileRlReplay):
    """Adapter of `PrioritizedReplayBuffer`, which divides weights by the largest possible weight of a stored row."""

    extend = None

    def _make(self, shape: ReplayShape) -> Any:
        return PrioritizedReplayBuffer(shape.capacity, alpha=ALPHA)

    def sample(self, batch_size: int) -> Any:
        return self._buffer.sample(batch_size, beta=BETA)

    def read(self, batch: Any) -> ReplayBatch:
        return super().read(batch)._replace(weight=drop_unit_axis(batch["weights"]))

    def priority(self, values: Array) -> Array:
        return values

    def update(self, batch: Any, priority: Array) -> None:
        self._buffer.update_priorities(batch["idxs"], priority)

    def handles(self, batch: Any) -> Array:
        return batch["idxs"].numpy()

    def set_priority(self, handles: Array, priority: Array) -> None:
        self._buffer.update_priorities(handles, priority)


class AgileRlNStep(AgileRlReplay):
    """Adapter of `MultiStepReplayBuffer`, which sums rewards when steps are written."""

    extend = None

    def __init__(self, shape: ReplayShape, n: int, gamma: float) -> None:
        self._buffer = MultiStepReplayBuffer(shape.capacity, n_step=n, gamma=gamma)

    def fill(self, block: Transitions) -> None:
        for row in range(len(block)):
            self.add(self.prepare(block[row : row + 1]))


def adapter() -> Adapter:
    """Return the adapter of AgileRL."""
    return Adapter(
        "AgileRL",
        version("agilerl"),
        gae=AgileRlGae,
        recurrent=AgileRlRecurrent,
        replay=AgileRlReplay,
        without_replacement=AgileRlReplay,
        prioritized=AgileRlPrioritized,
        n_step=AgileRlNStep,
    )
