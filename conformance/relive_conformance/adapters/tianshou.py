# pyright: reportMissingImports=false
"""Tianshou: its replay buffers, `compute_episodic_return`, `compute_nstep_return` and `Batch.split`.

Rows are env-major: all steps of environment 0, then all of environment 1. It asks for the values of all next states,
multiplies terminated ones by zero, and cuts the chain at episode ends and at the newest row of each sub-buffer.
Values and log-probabilities are usually computed again before an update; here they are stored under its `policy` key.

It draws numpy arrays and keeps rewards as float64. Memory is saved by not storing the next observation, which at a
truncated step gives the observation itself, and by storing only the newest frame, stacked on the first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Algorithm, _gae
from tianshou.data import Batch as TianshouBatch
from tianshou.data import HERReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer

from relive_conformance.adapters.off_policy import (
    ALPHA,
    BETA,
    GoalBatch,
    GoalStep,
    NotOffered,
    ReplayBatch,
    ReplayShape,
    Transitions,
    drop_unit_axis,
    goal_reward,
)
from relive_conformance.adapters.protocol import Adapter, Array, Batch, RolloutShape, Step, Trajectory


def _env_major(array: Array) -> Array:
    """Flatten [T, N] to contiguous [N·T]."""
    return np.ascontiguousarray(array.T).reshape(-1)


class TianshouGae:
    """The compiled scan under `compute_episodic_return`, without the buffer look-ups around it."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        self._shape = trajectory.reward.shape
        reward, value = _env_major(trajectory.reward), _env_major(trajectory.value)
        next_value = _env_major(trajectory.next_value * ~trajectory.terminated)
        ended = trajectory.ended.copy()
        # Tianshou computes all environments in one scan: the last step of each environment must stop it.
        ended[-1] = True
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
    """Adapter of `VectorReplayBuffer` of N sub-buffers that does not keep a second copy of each observation."""

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


class TianshouReplay:
    """Adapter of `ReplayBuffer` for one environment, `VectorReplayBuffer` for several."""

    default_seed = "random_seed is 42 unless it is given"

    def __init__(self, shape: ReplayShape) -> None:
        self._one = shape.num_envs == 1
        self._buffer: Any = self._make(shape)

    def _make(self, shape: ReplayShape) -> Any:
        seed: dict[str, Any] = {} if shape.seed is None else {"random_seed": shape.seed}
        if self._one:
            return ReplayBuffer(shape.capacity, **seed)
        return VectorReplayBuffer(shape.capacity, shape.num_envs, **seed)

    def prepare(self, step: Transitions) -> Any:
        batch = TianshouBatch(
            obs=step.obs,
            act=step.action,
            rew=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
            obs_next=step.next_obs,
        )
        return batch[0] if self._one else batch

    def add(self, prepared: Any) -> None:
        self._buffer.add(prepared)

    def fill(self, block: Transitions) -> None:
        columns: dict[str, Any] = {
            "obs": block.obs,
            "act": block.action,
            "rew": block.reward.astype(np.float64),
            "terminated": block.terminated,
            "truncated": block.truncated,
            "done": block.ended,
            "obs_next": block.next_obs,
        }
        self._buffer.update(ReplayBuffer.from_data(**columns))

    extend = fill

    def clear(self) -> None:
        self._buffer.reset()

    def save(self, path: str) -> None:
        self._buffer.save_hdf5(path)

    def load(self, path: str) -> None:
        self._buffer = type(self._buffer).load_hdf5(path)

    def sample(self, batch_size: int) -> Any:
        return _learned(self._buffer.sample(batch_size)[0])

    def read(self, batch: Any) -> ReplayBatch:
        return ReplayBatch(*(leaf.numpy() for leaf in batch))

    @property
    def stored(self) -> int:
        return len(self._buffer)

    @property
    def nbytes(self) -> int:
        held = [self._buffer._indices, *(value for _, value in self._buffer._meta.items())]
        return sum(array.nbytes for array in held if isinstance(array, np.ndarray))


def _learned(batch: Any) -> list[torch.Tensor]:
    arrays = batch.obs, batch.act, batch.rew, batch.terminated, batch.obs_next
    return [torch.from_numpy(array) for array in arrays]


class TianshouSavingReplay(TianshouReplay):
    """Adapter of `ignore_obs_next`, and for images of `save_only_last_obs` with `stack_num`."""

    def __init__(self, shape: ReplayShape) -> None:
        self._is_image = shape.is_image
        super().__init__(shape)

    def _make(self, shape: ReplayShape) -> Any:
        if not self._one:
            raise NotOffered
        frames = {"save_only_last_obs": True, "stack_num": shape.obs[-1]} if shape.is_image else {}
        return ReplayBuffer(shape.capacity, ignore_obs_next=True, **frames)

    def prepare(self, step: Transitions) -> Any:
        batch = super().prepare(step)
        if self._is_image:
            batch.obs, batch.obs_next = (
                np.ascontiguousarray(np.moveaxis(o, -1, 0)) for o in (batch.obs, batch.obs_next)
            )
        return batch

    def fill(self, block: Transitions) -> None:
        for row in range(len(block)):
            self.add(self.prepare(block[row : row + 1]))

    def read(self, batch: Any) -> ReplayBatch:
        read = super().read(batch)
        if not self._is_image:
            return read
        obs, next_obs = (np.moveaxis(o, 1, -1) for o in (read.obs, read.next_obs))
        return read._replace(obs=obs, next_obs=next_obs)


class TianshouStackedReplay(TianshouSavingReplay):
    """Adapter of stacked frames, which draws only rows with a complete stack."""

    def _make(self, shape: ReplayShape) -> Any:
        frames = {"save_only_last_obs": True, "stack_num": shape.obs[-1], "sample_avail": True}
        return ReplayBuffer(shape.capacity, ignore_obs_next=True, **frames)


class TianshouPrioritized(TianshouReplay):
    """Adapter of `PrioritizedReplayBuffer`, which divides weights by the largest weight of the batch."""

    draws_from = "prioritized draws come from numpy's global generator"

    def _make(self, shape: ReplayShape) -> Any:
        if not self._one:
            raise NotOffered
        return PrioritizedReplayBuffer(shape.capacity, ALPHA, BETA)

    def sample(self, batch_size: int) -> Any:
        batch, index = self._buffer.sample(batch_size)
        return [*_learned(batch), torch.from_numpy(batch.weight)], index

    def read(self, batch: Any) -> ReplayBatch:
        return super().read(batch[0])

    def priority(self, values: Array) -> Array:
        return values

    def update(self, batch: Any, priority: Array) -> None:
        self._buffer.update_weight(batch[1], priority)

    def handles(self, batch: Any) -> Array:
        return batch[1]

    def set_priority(self, handles: Array, priority: Array) -> None:
        self._buffer.update_weight(handles, priority)


class TianshouNStep(TianshouReplay):
    """Adapter of `compute_nstep_return` over a drawn batch, with values of zero so that only the rewards are summed."""

    def __init__(self, shape: ReplayShape, n: int, gamma: float) -> None:
        super().__init__(shape)
        self._n, self._gamma = n, gamma

    def sample(self, batch_size: int) -> Any:
        batch, index = self._buffer.sample(batch_size)
        rewards, last = self._summed(batch, index, 0.0)
        obs, action, _, _, _ = _learned(batch)
        _, _, _, terminated, next_obs = _learned(last)
        return [obs, action, rewards, terminated, next_obs]

    def _summed(self, batch: Any, index: Array, value: float) -> tuple[torch.Tensor, Any]:
        """Compute returns with the same value for every state; return them and the last steps of the windows."""
        last: list[Any] = []

        def target_q(buffer: ReplayBuffer, after: Array) -> torch.Tensor:
            last.append(buffer[after])
            return torch.full((len(after),), value)

        batch = Algorithm.compute_nstep_return(batch, self._buffer, index, target_q, self._gamma, self._n)
        return batch.returns.flatten(), last[0]


class TianshouNStepWithDiscount(TianshouNStep):
    """Adapter of `compute_nstep_return` for values 0 and 1: the difference of the returns is the discount."""

    def sample(self, batch_size: int) -> Any:
        batch, index = self._buffer.sample(batch_size)
        rewards, last = self._summed(batch, index, 0.0)
        with_ones, _ = self._summed(batch, index, 1.0)
        obs, action, _, _, _ = _learned(batch)
        _, _, _, terminated, next_obs = _learned(last)
        return [obs, action, rewards, terminated, next_obs, with_ones - rewards]

    def read(self, batch: Any) -> ReplayBatch:
        *leaves, discount = (leaf.numpy() for leaf in batch)
        # After a termination nothing is added, whatever the discount.
        return ReplayBatch(*leaves, discount=np.where(leaves[3], np.nan, discount))


class TianshouHindsight:
    """Adapter of `HERReplayBuffer`, which has only the strategy "future" and does not change flags."""

    def __init__(self, capacity: int, strategy: str) -> None:
        if strategy != "future":
            raise NotOffered
        self._buffer: Any = HERReplayBuffer(
            capacity, compute_reward_fn=lambda a, g: goal_reward(a, g).reshape(-1), horizon=8
        )

    def add(self, step: GoalStep) -> None:
        obs, obs_next = (
            TianshouBatch(observation=np.array([at]), achieved_goal=np.array([at]), desired_goal=np.array([step.goal]))
            for at in (step.at, step.next_at)
        )
        flags: dict[str, Any] = {"terminated": step.terminated, "truncated": step.truncated}
        self._buffer.add(TianshouBatch(obs=obs, act=0.0, rew=step.reward, obs_next=obs_next, **flags))

    def sample(self, batch_size: int) -> GoalBatch:
        batch, _ = self._buffer.sample(batch_size)
        columns = batch.obs.achieved_goal, batch.obs.desired_goal, batch.obs_next.achieved_goal, batch.rew
        return GoalBatch(*(drop_unit_axis(column) for column in columns))


def adapter() -> Adapter:
    """Return the adapter of Tianshou."""
    return Adapter(
        "Tianshou",
        version("tianshou"),
        gae=TianshouGae,
        rollout=TianshouRollout,
        replay=TianshouReplay,
        replay_saving={"ignore_obs_next, save_only_last_obs": TianshouSavingReplay},
        prioritized=TianshouPrioritized,
        stacked=TianshouStackedReplay,
        n_step=TianshouNStep,
        n_step_plain=TianshouNStepWithDiscount,
        hindsight=TianshouHindsight,
    )
