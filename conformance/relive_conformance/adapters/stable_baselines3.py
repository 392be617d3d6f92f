# pyright: reportMissingImports=false
"""Stable-Baselines3: `RolloutBuffer`, `ReplayBuffer` and `NStepReplayBuffer`.

Its flag is `episode_start`: the episode ended *before* the step it is stored with; the newest end is an argument of
the advantage computation. Truncated steps are bootstrapped by adding γ V(final) to the reward before storing.
Replay buffers learn of a truncation through an info dict and hand out `done` without it, which is our `terminated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.type_aliases import ReplayBufferSamples, RolloutBufferSamples
from stable_baselines3.her import HerReplayBuffer

from relive_conformance.adapters.off_policy import (
    GoalBatch,
    GoalStep,
    ReplayBatch,
    ReplayShape,
    Transitions,
    drop_unit_axis,
    goal_reward,
)
from relive_conformance.adapters.protocol import Adapter, Array, Batch, RolloutShape, Step, Trajectory


def _box(*shape: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def _buffer(shape: RolloutShape) -> RolloutBuffer:
    spaces_ = _box(shape.obs_dim), _box(shape.action_dim)
    return RolloutBuffer(shape.num_steps, *spaces_, device="cpu", n_envs=shape.num_envs)


class SB3Gae:
    """Adapter of `compute_returns_and_advantage` of a buffer whose columns are already filled."""

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
    """Adapter of `RolloutBuffer`, which takes numpy arrays, and tensors for value and log_prob."""

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


class SB3Replay:
    """Adapter of `ReplayBuffer`, which takes numpy arrays and returns tensors."""

    draws_from = "draws come from numpy's global generator, which set_random_seed seeds"

    def __init__(self, shape: ReplayShape) -> None:
        self._buffer = self._make(shape)

    def _make(self, shape: ReplayShape) -> ReplayBuffer:
        return ReplayBuffer(*_arguments(shape), device="cpu", n_envs=shape.num_envs)

    def prepare(self, step: Transitions) -> Any:
        infos = [{"TimeLimit.truncated": True} if truncated else {} for truncated in step.truncated & ~step.terminated]
        return step.obs, step.next_obs, step.action, step.reward, step.ended, infos

    def add(self, prepared: Any) -> None:
        self._buffer.add(*prepared)

    def fill(self, block: Transitions) -> None:
        buffer = self._buffer
        rows = slice(buffer.pos, buffer.pos + len(block))
        buffer.observations[rows, 0] = block.obs
        buffer.next_observations[rows, 0] = block.next_obs
        buffer.actions[rows, 0] = block.action
        buffer.rewards[rows, 0] = block.reward
        buffer.dones[rows, 0] = block.ended
        buffer.timeouts[rows, 0] = block.truncated & ~block.terminated
        buffer.full |= rows.stop == buffer.buffer_size
        buffer.pos = rows.stop % buffer.buffer_size

    def raw(self, step: Transitions) -> Any:
        infos = [{}] * self._buffer.n_envs
        return step.obs, step.next_obs, step.action, step.reward, step.terminated, infos

    def clear(self) -> None:
        self._buffer.reset()

    def save(self, path: str) -> None:
        save_to_pkl(path, self._buffer)

    def load(self, path: str) -> None:
        self._buffer = load_from_pkl(path)

    def sample(self, batch_size: int) -> ReplayBufferSamples:
        return self._buffer.sample(batch_size)

    def read(self, batch: ReplayBufferSamples) -> ReplayBatch:
        return ReplayBatch(
            obs=batch.observations.numpy(),
            action=batch.actions.numpy(),
            reward=drop_unit_axis(batch.rewards),
            terminated=drop_unit_axis(batch.dones),
            next_obs=batch.next_observations.numpy(),
            discount=None if batch.discounts is None else drop_unit_axis(batch.discounts),
        )

    @property
    def stored(self) -> int:
        return self._buffer.size() * self._buffer.n_envs

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self._buffer).values() if isinstance(value, np.ndarray))


def _arguments(shape: ReplayShape) -> tuple[int, spaces.Box, spaces.Box]:
    obs = spaces.Box(0, 255, shape.obs, np.uint8) if shape.is_image else _box(*shape.obs)
    return shape.capacity, obs, _box(shape.action_dim)


class SB3SavingReplay(SB3Replay):
    """Adapter of `optimize_memory_usage`, which stores observations once and forbids the handling of truncation."""

    def _make(self, shape: ReplayShape) -> ReplayBuffer:
        settings = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        return ReplayBuffer(*_arguments(shape), device="cpu", n_envs=shape.num_envs, **settings)

    def fill(self, block: Transitions) -> None:
        for row in range(len(block)):
            self.add(self.prepare(block[row : row + 1]))


class SB3NStep(SB3Replay):
    """Adapter of `NStepReplayBuffer`, which sums rewards when it is sampled."""

    def __init__(self, shape: ReplayShape, n: int, gamma: float) -> None:
        super().__init__(shape)
        self._buffer = NStepReplayBuffer(
            *_arguments(shape), device="cpu", n_envs=shape.num_envs, n_steps=n, gamma=gamma
        )


class _Rewards:
    """Stand-in for an environment, with the only method that `HerReplayBuffer` calls."""

    def env_method(self, name: str, achieved: Array, goal: Array, infos: Any, indices: Any = None) -> list[Array]:
        return [goal_reward(achieved, goal).reshape(-1)]


class SB3Hindsight:
    """Adapter of `HerReplayBuffer`: its future strategy includes the step itself, and `done` stays what was stored."""

    def __init__(self, capacity: int, strategy: str) -> None:
        parts: dict[str, spaces.Space[Any]] = {
            name: _box(1) for name in ("observation", "achieved_goal", "desired_goal")
        }
        env: Any = _Rewards()
        self._buffer = HerReplayBuffer(
            capacity, spaces.Dict(parts), _box(1), env, device="cpu", goal_selection_strategy=strategy
        )

    def add(self, step: GoalStep) -> None:
        obs, next_obs = (
            {k: np.array([[v]], np.float32) for k, v in _goal(at, step.goal)} for at in (step.at, step.next_at)
        )
        ended = np.array([step.terminated or step.truncated])
        infos = [{"TimeLimit.truncated": step.truncated}]
        self._buffer.add(obs, next_obs, np.zeros((1, 1), np.float32), np.array([step.reward]), ended, infos)

    def sample(self, batch_size: int) -> GoalBatch:
        batch = self._buffer.sample(batch_size)
        obs, next_obs = batch.observations, batch.next_observations
        columns = obs["achieved_goal"], obs["desired_goal"], next_obs["achieved_goal"], batch.rewards
        return GoalBatch(*(drop_unit_axis(column) for column in columns))


def _goal(at: float, goal: float) -> list[tuple[str, float]]:
    return [("observation", at), ("achieved_goal", at), ("desired_goal", goal)]


def adapter() -> Adapter:
    """Return the adapter of Stable-Baselines3."""
    return Adapter(
        "Stable-Baselines3",
        version("stable_baselines3"),
        gae=SB3Gae,
        rollout=SB3Rollout,
        replay=SB3Replay,
        replay_saving={"optimize_memory_usage": SB3SavingReplay},
        n_step=SB3NStep,
        hindsight=SB3Hindsight,
    )
