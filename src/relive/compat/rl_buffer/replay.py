"""rl-buffer's replay buffers on ours: drawn uniformly, by priority, or by several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from relive.compat.rl_buffer.limits import CPU, BaseBuffer, ResetStrategy, fields_of, renamed
from relive.compat.rl_buffer.statistics import StatsTracker
from relive.compat.rl_buffer.sum_tree import SumTree
from relive.concurrent import Handle, connect
from relive.errors import explain
from relive.fields.batch import moved
from relive.fields.schema import Field
from relive.memory import Memory
from relive.replay.buffer import ReplayBuffer as _Replay
from relive.replay.samplers import Prioritized


@dataclass
class ReplayBatch:
    """Transitions `[B]`."""

    observations: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    dones: torch.Tensor
    truncateds: torch.Tensor
    next_observations: torch.Tensor


@dataclass
class PrioritizedReplayBatch(ReplayBatch):
    """Transitions `[B]` with the rows' names, for `update_priorities`, and their weights."""

    indices: torch.Tensor
    weights: torch.Tensor


_REPLAY_FIELDS = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "dones": "terminated",
    "truncateds": "truncated",
    "next_observations": "next_obs",
}


class _Transitions(BaseBuffer):
    """What both replay buffers do."""

    core: _Replay

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        stats_tracker: StatsTracker,
        obs_dtype: torch.dtype,
        action_dtype: torch.dtype,
        device: torch.device,
        store_device: torch.device | None,
        reset_strategy: ResetStrategy,
        sampler: Prioritized | None,
        seed: int | None,
        place: Memory | Handle | None = None,
    ) -> None:
        super().__init__(buffer_size, num_envs, stats_tracker, device, store_device, reset_strategy)
        self.obs_shape, self.action_shape = obs_shape, action_shape
        self.core = (
            connect(place, seed=seed)
            if isinstance(place, Handle)
            else _Replay(
                self.total_capacity,
                Field(obs_shape, obs_dtype),
                Field(action_shape, action_dtype),
                num_envs=num_envs,
                # Copies of their own: every time step then fits, whatever its next observation is.
                next_obs="stored",
                sampler=sampler,
                device=self.store_device if place is None else place,
                seed=seed,
            )
        )
        memory = self.core.columns
        self._fields = fields_of(memory)
        self._observations, self._actions, self._rewards, self._dones, self._truncateds, self._next_observations = (
            memory[name] for name in _REPLAY_FIELDS.values()
        )

    def add(
        self,
        obs: torch.Tensor,
        action: torch.Tensor,
        reward: torch.Tensor,
        done: torch.Tensor,
        next_obs: torch.Tensor,
        truncated: torch.Tensor,
        infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> None:
        """Store one step of every environment.

        `done` says where an episode terminated and `truncated` where it was cut short, as bools or numbers. Without
        names `truncated` may also come before `next_obs`: their shapes tell.
        """
        if self.obs_shape and np.shape(next_obs) == (self.num_envs,):
            next_obs, truncated = truncated, next_obs
        flags = {"terminated": self._stored(done) != 0, "truncated": self._stored(truncated) != 0}
        self._add(infos, done_reasons, obs=obs, action=action, reward=reward, **flags, next_obs=next_obs)

    def _sample(self, batch_size: int) -> TensorDict:
        if not len(self.core):
            raise ValueError("Cannot sample from empty buffer")
        return moved(self.core.sample(batch_size), self.device)


class ReplayBuffer(_Transitions):
    """The newest `buffer_size` time steps of `num_envs` environments, drawn uniformly."""

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        stats_tracker: StatsTracker,
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        store_device: torch.device | None = None,
        reset_strategy: ResetStrategy = ResetStrategy.RECURRENT,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            buffer_size, num_envs, obs_shape, action_shape, stats_tracker, obs_dtype, action_dtype,
            device, store_device, reset_strategy, None, seed,
        )  # fmt: skip

    def get(self, batch_size: int) -> ReplayBatch:
        """Transitions drawn with replacement, at most as many as are stored."""
        if 0 < self.total_current_size < batch_size:
            available = self.total_current_size
            raise ValueError(f"Batch size {batch_size} is larger than available samples {available}")
        return ReplayBatch(**renamed(_REPLAY_FIELDS, self._sample(batch_size)))


@dataclass
class SharedMemoryComponents:
    """What a worker needs to find the main process's steps: small, to be sent to it."""

    handle: Handle


@dataclass
class SharedStates:
    """Counters are beside the steps, so that there is nothing to send."""


class SharedReplayBuffer(_Transitions):
    """A `ReplayBuffer` that the main process makes and workers on the same machine add to and draw from.

    A lock keeps steps whole. Each process tells its own tracker of the steps that it adds.
    """

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        stats_tracker: StatsTracker,
        is_main_process: bool,
        shared_memory_components: SharedMemoryComponents | None = None,
        shared_states: SharedStates | None = None,
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        reset_strategy: ResetStrategy = ResetStrategy.RECURRENT,
        *,
        seed: int | None = None,
    ) -> None:
        given = shared_memory_components
        if is_main_process and (given is not None or shared_states is not None):
            remedy = "Leave them out: the main process makes them."
            where, expected = "SharedReplayBuffer", "no shared components in the main process"
            raise ValueError(explain(where, expected, type(shared_states if given is None else given).__name__, remedy))
        if not is_main_process and given is None:
            remedy = "Pass shared_memory_components= of the main process's buffer."
            where, expected = "SharedReplayBuffer", "the main process's shared components in a worker"
            raise ValueError(explain(where, expected, None, remedy))
        super().__init__(
            buffer_size, num_envs, obs_shape, action_shape, stats_tracker, obs_dtype, action_dtype,
            device, CPU, reset_strategy, None, seed, Memory.shared() if given is None else given.handle,
        )  # fmt: skip

    get = ReplayBuffer.get

    def get_shared_components(self) -> tuple[SharedMemoryComponents, SharedStates]:
        """What workers are made with."""
        return SharedMemoryComponents(self.core.handle()), SharedStates()


class PrioritizedReplayBuffer(_Transitions):
    """The newest `buffer_size` time steps of `num_envs` environments, drawn by priority `(|td| + epsilon)^alpha`.

    New rows get the largest priority so far. `beta` may be set at any time.
    """

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        stats_tracker: StatsTracker,
        alpha: float = 0.6,
        beta: float = 0.4,
        epsilon: float = 1e-6,
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        store_device: torch.device | None = None,
        reset_strategy: ResetStrategy = ResetStrategy.RECURRENT,
        *,
        seed: int | None = None,
    ) -> None:
        self.alpha, self.beta, self.epsilon = alpha, beta, epsilon
        self._current_beta = beta
        sampler = Prioritized(alpha, lambda _: self._current_beta, epsilon)
        super().__init__(
            buffer_size, num_envs, obs_shape, action_shape, stats_tracker, obs_dtype, action_dtype,
            device, store_device, reset_strategy, sampler, seed,
        )  # fmt: skip

    def get(self, batch_size: int, beta: float | None = None) -> PrioritizedReplayBatch:
        """Transitions drawn by priority, with weights `(M · P)^-beta` over the largest of the batch."""
        self._current_beta = self.beta if beta is None else beta
        batch = self._sample(batch_size)
        fields = _REPLAY_FIELDS | {"indices": "index", "weights": "weight"}
        return PrioritizedReplayBatch(**renamed(fields, batch))

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        """Give the rows `indices` of a batch the priorities of their errors; rows overwritten meanwhile are skipped."""
        rows, errors = (torch.as_tensor(x).detach().to(self.store_device).flatten() for x in (indices, td_errors))
        self.core.update_priority(rows.long(), errors.abs())

    @property
    def sum_tree(self) -> SumTree:
        """The priorities of all rows; leaf t · num_envs + env is that of time step t of the memory."""
        ring, tree = self.core.storage.memory.ring, self.core.storage.tree()
        return SumTree._around(tree, self.total_capacity, int(ring.head[0]) % ring.slots * self.num_envs)

    @property
    def _max_priority(self) -> float:
        run: Any = self.core.run
        return float(run.largest_mass)
