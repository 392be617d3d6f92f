# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# If the library is missing, pyright resolves its name to this file.
"""rlox: `compute_gae_batched_f32`, `RolloutBatch.sample_minibatches` and three replay buffers.

Rows of the estimator are env-major. Rollouts are collected only inside its own loop, which steps the environment, so
there is no rollout `add` to compare; the container that this loop hands to PPO shuffles, and is offered as `epoch`.

Its replay buffers take flat float32 observations only and hold them where Python does not see them. Each draw is given
a seed. The prioritized and the sequence buffer take one transition at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from rlox import HERBuffer, PrioritizedReplayBuffer, ReplayBuffer, SequenceReplayBuffer, compute_gae_batched_f32
from rlox.batch import RolloutBatch
from rlox.collectors import RolloutCollector

from relive_conformance.adapters.off_policy import (
    ALPHA,
    BETA,
    GoalBatch,
    GoalStep,
    NotOffered,
    ReplayBatch,
    ReplayShape,
    Transitions,
)
from relive_conformance.adapters.protocol import Adapter, Array, Batch, Step, Trajectory

_LEARNED = ("obs", "actions", "rewards", "terminated", "next_obs")


def _env_major(array: Array) -> Array:
    """Flatten [T, N] to contiguous float32 [N·T]."""
    return np.ascontiguousarray(array.T, dtype=np.float32).reshape(-1)


class RloxGae:
    """Adapter of `compute_gae_batched_f32`, which computes all environments in one native call."""

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
    """Adapter of `RolloutBatch`, which shuffles a copy of every field per epoch and returns slices of the copy."""

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


class RloxReplay:
    """Adapter of `ReplayBuffer`: `push` for one environment, `push_batch` for several."""

    nbytes = None

    def __init__(self, shape: ReplayShape) -> None:
        if shape.is_image:
            raise NotOffered("flat float32 observations only")
        self._one = shape.num_envs == 1
        self._buffer: Any = ReplayBuffer(shape.capacity, shape.obs[0], shape.action_dim)
        # Each draw takes a seed. Without a seed of the user, the count starts at a random number.
        self._seed = int(np.random.default_rng(shape.seed).integers(2**32))

    def prepare(self, step: Transitions) -> Any:
        return next(_singly(step)) if self._one else _together(step)

    def add(self, prepared: Any) -> None:
        (self._buffer.push if self._one else self._buffer.push_batch)(*prepared)

    def fill(self, block: Transitions) -> None:
        self._buffer.push_batch(*_together(block))

    extend = fill

    def sample(self, batch_size: int) -> Any:
        self._seed += 1
        batch = self._buffer.sample(batch_size, self._seed)
        return [torch.from_numpy(batch[name]) for name in _LEARNED]

    def read(self, batch: Any) -> ReplayBatch:
        return ReplayBatch(*(leaf.numpy() for leaf in batch))

    @property
    def stored(self) -> int:
        return len(self._buffer)


def _together(step: Transitions) -> tuple[Array, ...]:
    obs, next_obs, action = (np.ascontiguousarray(a).reshape(-1) for a in (step.obs, step.next_obs, step.action))
    return obs, next_obs, action, step.reward, step.terminated.astype(np.uint8), step.truncated.astype(np.uint8)


def _singly(block: Transitions) -> Iterator[tuple[Any, ...]]:
    scalars = zip(block.reward.tolist(), block.terminated.tolist(), block.truncated.tolist(), strict=True)
    for row, (reward, terminated, truncated) in enumerate(scalars):
        yield block.obs[row], block.action[row], reward, terminated, truncated, block.next_obs[row]


class RloxPrioritized(RloxReplay):
    """Adapter of `PrioritizedReplayBuffer`; a pushed transition has priority 1."""

    def __init__(self, shape: ReplayShape) -> None:
        super().__init__(shape._replace(capacity=1))
        if not self._one:
            raise NotOffered("one transition at a time")
        self._buffer = PrioritizedReplayBuffer(shape.capacity, shape.obs[0], shape.action_dim, ALPHA, BETA)

    def fill(self, block: Transitions) -> None:
        for transition in _singly(block):
            self._buffer.push(*transition)

    extend = None

    def sample(self, batch_size: int) -> Any:
        self._seed += 1
        batch = self._buffer.sample(batch_size, self._seed)
        return [torch.from_numpy(batch[name]) for name in (*_LEARNED, "weights")], batch["indices"]

    def read(self, batch: Any) -> ReplayBatch:
        return ReplayBatch(*(leaf.numpy() for leaf in batch[0]))

    def priority(self, values: Array) -> Array:
        return values.astype(np.float64)

    def update(self, batch: Any, priority: Array) -> None:
        self._buffer.update_priorities(batch[1], priority)

    def handles(self, batch: Any) -> Array:
        return batch[1]

    def set_priority(self, handles: Array, priority: Array) -> None:
        self._buffer.update_priorities(handles, priority)


class RloxSequence(RloxReplay):
    """Adapter of `SequenceReplayBuffer`: runs of steps inside one finished episode that is long enough."""

    finished_only = "sequences of finished episodes only"

    def __init__(self, shape: ReplayShape, length: int) -> None:
        super().__init__(shape._replace(capacity=1))
        if not self._one:
            raise NotOffered("sequences of one environment only")
        self._buffer = SequenceReplayBuffer(shape.capacity, shape.obs[0], shape.action_dim)
        self._length = length

    def prepare(self, step: Transitions) -> Any:
        obs, action, reward, terminated, truncated, next_obs = next(_singly(step))
        return obs, next_obs, action, reward, terminated, truncated

    def add(self, prepared: Any) -> None:
        self._buffer.push(*prepared)

    def fill(self, block: Transitions) -> None:
        for row in range(len(block)):
            self.add(self.prepare(block[row : row + 1]))

    def sample(self, batch_size: int) -> Any:
        self._seed += 1
        batch = self._buffer.sample_sequences(batch_size, self._length, self._seed)
        return [torch.from_numpy(batch[name]) for name in _LEARNED]


class RloxHindsight:
    """Adapter of `HERBuffer` over observations (achieved, desired)."""

    def __init__(self, capacity: int, strategy: str) -> None:
        self._buffer: Any = HERBuffer(capacity, 2, 1, 1, 0, 1, strategy=strategy)
        self._seed = 0

    def add(self, step: GoalStep) -> None:
        obs, next_obs = (np.array([at, step.goal], np.float32) for at in (step.at, step.next_at))
        self._buffer.push(obs, next_obs, np.zeros(1, np.float32), step.reward, step.terminated, step.truncated)

    def sample(self, batch_size: int) -> GoalBatch:
        self._seed += 1
        batch = self._buffer.sample(batch_size, seed=self._seed)
        at, goal, next_at = batch["obs"][:, 0], batch["obs"][:, 1], batch["next_obs"][:, 0]
        return GoalBatch(at, goal, next_at, batch["rewards"])


class RloxCollected:
    """Adapter of `RolloutCollector`, with an environment that plays a trajectory: obs is the number of its value."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        played: Any = _Played(trajectory)
        num_envs = self._num_envs = trajectory.reward.shape[1]
        collector = RolloutCollector("", n_envs=num_envs, gamma=gamma, gae_lambda=lam, env=played)
        return lambda: collector.collect(played, len(trajectory.reward))

    def read(self, output: Any) -> tuple[Array, Array]:
        advantage, return_ = (leaf.numpy().reshape(-1, self._num_envs) for leaf in (output.advantages, output.returns))
        return advantage, return_


class _Played:
    """An environment and a policy that play a trajectory."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory, self._t = trajectory, 0

    def reset_all(self) -> Array:
        return self._trajectory.value[0][:, None]

    def step_all(self, actions: Any) -> dict[str, Any]:
        played, t = self._trajectory, self._t
        self._t += 1
        ended, last = played.ended[t], t + 1 == len(played.reward)
        after = played.next_value[t] if last else np.where(ended, played.value[t + 1], played.next_value[t])
        return {
            "obs": after[:, None].astype(np.float32),
            "rewards": played.reward[t].astype(np.float64),
            "terminated": played.terminated[t].astype(np.uint8),
            "truncated": played.truncated[t].astype(np.uint8),
            "terminal_obs": [played.next_value[t, n : n + 1] if end else None for n, end in enumerate(ended)],
        }

    def get_action_and_logprob(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(obs)), torch.zeros(len(obs))

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        return obs[:, 0]


def adapter() -> Adapter:
    """Return the adapter of rlox."""
    return Adapter(
        "rlox",
        version("rlox"),
        gae=RloxGae,
        collected=RloxCollected,
        epoch=RloxEpoch,
        replay=RloxReplay,
        prioritized=RloxPrioritized,
        sequence=RloxSequence,
        hindsight=RloxHindsight,
    )
