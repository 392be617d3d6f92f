"""rl-buffer's names on our core: its replay buffers (shared, prioritized), `RolloutBuffer`, `StatsTracker`, `SumTree`.

Sizes (`len`, `capacity`, `full`) count time steps; the `total_` ones count transitions. What is different here, because
it matters for learning:

- `done` is what the step just taken led to, for advantages as for statistics: `done[t]` ends the episode after step t.
  `last_dones` may say the same of the last step once more.
- Only stored steps are trained on, and before advantages are computed there is nothing to train on.
- Truncated steps end an episode in the statistics.
- `reset()` forgets priorities too. Indices name rows for ever, so that a priority meant for a row that was overwritten
  changes nothing.
- A rollout with `ResetStrategy.RECURRENT` stays in the order of time: the oldest step makes room.
- `explained_variance` of a rollout is that of its returns by its values.
- A step that does not fit changes nothing, next observations have the dtype of observations, and everything is stored
  on `store_device`, or on `device` where there is none.
- No global generator is used: `seed=` makes draws repeatable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from recollect import estimators
from recollect.batch import moved
from recollect.border import conform, overlaps
from recollect.concurrent import Handle, connect
from recollect.errors import NotReadyError, PriorityError, SchemaError, explain
from recollect.kernels.priority import priority_tree
from recollect.memory import Memory
from recollect.replay import ReplayBuffer as _Replay
from recollect.rollout import RolloutBuffer as _Rollout
from recollect.samplers import Prioritized
from recollect.schema import Field, positive
from recollect.stats import EpisodeStats

__all__ = [
    "BaseBuffer",
    "PrioritizedReplayBatch",
    "PrioritizedReplayBuffer",
    "ReplayBatch",
    "ReplayBuffer",
    "ResetStrategy",
    "RolloutBatch",
    "RolloutBuffer",
    "SharedMemoryComponents",
    "SharedReplayBuffer",
    "SharedStates",
    "StatsTracker",
    "SumTree",
    "explained_variance",
]

_CPU = torch.device("cpu")
_MOMENTS = ("mean", "std", "min", "max")


def explained_variance(y_pred: torch.Tensor, y_true: torch.Tensor) -> float:
    """How much of the variance of `y_true` the predictions explain; NaN if it has none. See our own of that name."""
    return float(estimators.explained_variance(y_pred, y_true))


# Statistics


class StatsTracker:
    """Rewards, lengths and further metrics of the last `max_ep_info_buffer` episodes, and why they ended.

    `metrics_keys` are "rewards", "lengths" and the extra ones. `core` is the recollect object underneath.
    """

    def __init__(
        self,
        num_envs: int,
        category: str = "Rollout",
        max_ep_info_buffer: int = 100,
        extra_metrics_keys: list[str] | None = None,
        done_reason_keys: list[str] | None = None,
    ) -> None:
        self.num_envs, self.category = num_envs, category
        self.metrics_keys = sorted({"rewards", "lengths", *(extra_metrics_keys or [])})
        self.done_reason_keys = list(done_reason_keys or [])
        self._ours = {key: f"ep_{key}" for key in self.metrics_keys} | {"rewards": "return", "lengths": "length"}
        self._extra = [key for key in self.metrics_keys if key not in ("rewards", "lengths")]
        self.core = EpisodeStats(
            num_envs,
            max_ep_info_buffer,
            metrics=[self._ours[key] for key in self._extra],
            reasons=[f"ep_done_{reason}" for reason in self.done_reason_keys],
        )

    def update(
        self,
        dones: Any,
        rewards: Any,
        infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> None:
        """Count one step of every environment: `dones`, `rewards` and what `infos` has of the metrics, each `[N]`.

        Rewards `[N, k]` are added up. A reason counts where the episode ends, if it is one of `done_reason_keys`.
        """
        infos, rewards, ended = {} if infos is None else infos, _on_host(rewards), _on_host(dones) != 0
        if rewards.ndim == 2:
            rewards = rewards.sum(1)
        missing = [None] * self.num_envs
        given = () if done_reasons is None else done_reasons
        reasons = np.array([*given, *missing][: self.num_envs], dtype=object)
        self.core.update(
            rewards,
            ended,
            np.zeros_like(ended),
            metrics={self._ours[key]: _on_host(infos[key]) for key in self._extra if key in infos},
            reasons={f"ep_done_{name}": np.asarray(reasons == name, dtype=bool) for name in self.done_reason_keys},
        )

    def reset(self) -> None:
        """Forget all episodes, the running ones too."""
        self.core.clear()

    @property
    def trajectory_num(self) -> int:
        """How many finished episodes the statistics are of."""
        return min(self.core.num_episodes, self.core.window)

    @property
    def ep_info_buffer(self) -> deque[dict[str, float]]:
        """The finished episodes, oldest first: `ep_<metric>`, and `ep_done_<reason>` where it was that."""
        episodes = self.core.episodes()
        named = {f"ep_{key}": episodes[self._ours[key]].tolist() for key in self.metrics_keys}
        reasons = {f"ep_done_{name}": episodes[f"ep_done_{name}"].tolist() for name in self.done_reason_keys}
        infos = (
            {name: float(values[i]) for name, values in named.items()}
            | {name: 1.0 for name, flags in reasons.items() if flags[i]}
            for i in range(self.trajectory_num)
        )
        return deque(infos, maxlen=self.core.window)

    @property
    def _current_episode_stats(self) -> dict[str, np.ndarray]:
        sums = self.core.snapshot()["open"].cpu().numpy()
        return dict(zip(("rewards", "lengths", *self._extra), sums, strict=True))

    def get_statistics(self) -> dict[str, float]:
        """Mean, deviation, smallest and largest of every metric, the same per step, and rates; empty at first."""
        if not self.trajectory_num:
            return {}
        summary = self.core.summary()
        per_step = {key: f"step_{self._ours[key]}" for key in self._extra} | {"rewards": "step_reward"}
        sources = {
            **{f"{key}_{of}": f"{self._ours[key]}_{of}" for key in self.metrics_keys for of in _MOMENTS},
            **{f"done_{reason}_rate": f"ep_done_{reason}_rate" for reason in self.done_reason_keys},
            **{f"step_{key}_{of}": f"{per_step[key]}_{of}" for key in sorted(per_step) for of in _MOMENTS},
        }
        return {f"{self.category}/{theirs}": summary[ours] for theirs, ours in sources.items()}

    def get_raw_values(self) -> dict[str, np.ndarray]:
        """Every metric of every episode `[E]`, and the same per step; empty at first."""
        if not self.trajectory_num:
            return {}
        episodes = self.core.episodes()
        values = {key: episodes[self._ours[key]].double().cpu().numpy() for key in self.metrics_keys}
        values |= {f"step_{key}": x / values["lengths"] for key, x in values.items() if key != "lengths"}
        return {f"{self.category}/{key}": x for key, x in values.items()}


def _on_host(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)


# Buffers


class ResetStrategy(Enum):
    """What `add` does when the buffer is full."""

    ERROR = "error"
    """Raise a RuntimeError."""
    RECURRENT = "recurrent"
    """Let the newest step replace the oldest one."""
    AUTO = "auto"
    """Forget everything and start again."""


class BaseBuffer:
    """What the buffers have in common: their sizes, their statistics, and what happens when they are full.

    `core` is the recollect buffer underneath.
    """

    core: Any
    _fields: dict[str, Field]
    """What the core stores, by its names."""

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        stats_tracker: StatsTracker,
        device: torch.device = _CPU,
        store_device: torch.device | None = None,
        reset_strategy: ResetStrategy = ResetStrategy.ERROR,
    ) -> None:
        self._buffer_size, self.num_envs = positive("buffer_size", buffer_size), positive("num_envs", num_envs)
        self.device = torch.device(device)
        self.store_device = self.device if store_device is None else torch.device(store_device)
        self.reset_strategy = reset_strategy
        self._stats_tracker = stats_tracker

    @property
    def stats_tracker(self) -> StatsTracker:
        """What is told of every step."""
        return self._stats_tracker

    @property
    def capacity(self) -> int:
        """How many time steps fit."""
        return self._buffer_size

    @property
    def total_capacity(self) -> int:
        """How many transitions fit."""
        return self._buffer_size * self.num_envs

    @property
    def current_size(self) -> int:
        """How many time steps are stored."""
        return len(self.core) // self.num_envs

    @property
    def total_current_size(self) -> int:
        """How many transitions are stored."""
        return len(self.core)

    @property
    def full(self) -> bool:
        """Whether the coming step meets the reset strategy."""
        return self.current_size == self._buffer_size

    def __len__(self) -> int:
        """How many time steps are stored."""
        return self.current_size

    def reset(self, reset_stats: bool = False) -> None:
        """Forget every step, and the statistics too if asked to."""
        self.core.clear()
        if reset_stats:
            self.stats_tracker.reset()

    def _add(self, infos: Mapping[str, Any] | None, done_reasons: Sequence[str | None] | None, **step: Any) -> None:
        """Tell the tracker of one step and give it to the core, once all of it is known to fit."""
        step = {name: self._stored(value) for name, value in step.items()}
        if self.full and self.reset_strategy is ResetStrategy.ERROR:
            raise RuntimeError("Buffer is full. Cannot add more transitions.")
        self._check(step)
        terminated, truncated, rewards = (_on_host(step[name]) for name in ("terminated", "truncated", "reward"))
        self.stats_tracker.update(
            dones=terminated | truncated,
            rewards=rewards,
            infos={} if infos is None else infos,
            done_reasons=[] if done_reasons is None else list(done_reasons),
        )
        if self.full:
            self._make_room()
        self.core.add(**step)

    def _stored(self, value: Any) -> Any:
        return value.detach().to(self.store_device) if isinstance(value, torch.Tensor) else np.asarray(value)

    def _check(self, step: Mapping[str, Any]) -> None:
        for name, value in step.items():
            conform(name, self._fields[name], value, (self.num_envs,), self.store_device)
        if "next_obs" in step and overlaps(step["obs"], step["next_obs"]):
            remedy = "The environment reuses its array: pass copies."
            raise SchemaError(explain("next_obs", "memory of its own", "that of obs", remedy))

    def _make_room(self) -> None:
        if self.reset_strategy is ResetStrategy.AUTO:
            self.reset()


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
        self._fields = _fields_of(memory)
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
        device: torch.device = _CPU,
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
        return ReplayBatch(**_renamed(_REPLAY_FIELDS, self._sample(batch_size)))


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
        device: torch.device = _CPU,
        reset_strategy: ResetStrategy = ResetStrategy.RECURRENT,
        *,
        seed: int | None = None,
    ) -> None:
        given = shared_memory_components
        if is_main_process and (given is not None or shared_states is not None):
            raise ValueError("SharedReplayBuffer: expected no shared components in the main process, which makes them.")
        if not is_main_process and given is None:
            raise ValueError("SharedReplayBuffer: expected the main process's shared components in a worker, got none.")
        super().__init__(
            buffer_size, num_envs, obs_shape, action_shape, stats_tracker, obs_dtype, action_dtype,
            device, _CPU, reset_strategy, None, seed, Memory.shared() if given is None else given.handle,
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
        device: torch.device = _CPU,
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
        return PrioritizedReplayBatch(**_renamed(fields, batch))

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        """Give the rows `indices` of a batch the priorities of their errors; rows overwritten meanwhile are skipped."""
        rows, errors = (torch.as_tensor(x).detach().to(self.store_device).flatten() for x in (indices, td_errors))
        self.core.update_priority(rows.long(), errors.abs())

    @property
    def sum_tree(self) -> SumTree:
        """The priorities of all rows; leaf t · num_envs + env is that of time step t of the memory."""
        ring, draws = self.core._storage.ring, self.core._draws
        return SumTree._around(draws._tree, self.total_capacity, int(ring.head[0]) % ring.slots * self.num_envs)

    @property
    def _max_priority(self) -> float:
        return float(self.core._draws._settings.mass(self.core._draws._largest))


@dataclass
class RolloutBatch:
    """Steps `[B]` with what is learnt from them."""

    observations: torch.Tensor
    actions: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    log_probs: torch.Tensor


_ROLLOUT_FIELDS = {
    "observations": "obs",
    "actions": "action",
    "returns": "return",
    "advantages": "advantage",
    "values": "value",
    "log_probs": "log_prob",
}


class RolloutBuffer(BaseBuffer):
    """`buffer_size` time steps of `num_envs` environments, with advantages and returns."""

    core: _Rollout

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        stats_tracker: StatsTracker,
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype = torch.float32,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        device: torch.device = _CPU,
        store_device: torch.device | None = None,
        reset_strategy: ResetStrategy = ResetStrategy.ERROR,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(buffer_size, num_envs, stats_tracker, device, store_device, reset_strategy)
        self.obs_shape, self.action_shape = obs_shape, action_shape
        self.gamma, self.gae_lambda = gamma, gae_lambda
        fields = Field(obs_shape, obs_dtype), Field(action_shape, action_dtype)
        self.core = _Rollout(
            buffer_size, num_envs, *fields, device=self.store_device, seed=seed
        )  # fmt: skip
        memory = self.core.columns
        self._fields = _fields_of(memory)
        self._observations, self._actions, self._rewards, self._dones, self._values, self._log_probs = (
            memory[name] for name in ("obs", "action", "reward", "terminated", "value", "log_prob")
        )

    def _make_room(self) -> None:
        super()._make_room()
        if self.reset_strategy is ResetStrategy.RECURRENT:
            memory = self.core.lend()
            memory[:, :-2] = memory[:, 1:-1].clone()
            self.core.take_back(self._buffer_size - 1)

    def add(
        self,
        obs: torch.Tensor,
        action: torch.Tensor,
        reward: torch.Tensor,
        done: torch.Tensor,
        value: torch.Tensor,
        log_prob: torch.Tensor,
        infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> None:
        """Store one step of every environment; `done` says whether this step ended the episode."""
        flags = {"terminated": self._stored(done) != 0, "truncated": np.zeros(self.num_envs, dtype=bool)}
        critic = {"value": value, "log_prob": log_prob}
        self._add(infos, done_reasons, obs=obs, action=action, reward=reward, **flags, **critic)

    def compute_returns_and_advantages(self, last_values: torch.Tensor, last_dones: torch.Tensor) -> None:
        """Generalised advantage estimation over the stored steps (see `recollect.gae`).

        `last_values` `[N]` are the values of the observations after the last step; where `last_dones` they are not
        used, since the last step ended the episode.
        """
        given = {"last_values": last_values, "last_dones": last_dones}
        last, over = (
            conform(name, Field(), torch.as_tensor(self._stored(x)).flatten(), (self.num_envs,), self.store_device)
            for name, x in given.items()
        )
        self.core.compute_advantage(last.masked_fill(over != 0, 0.0), gamma=self.gamma, lam=self.gae_lambda)

    def get(self, batch_size: int, shuffle: bool = True) -> Generator[RolloutBatch, None, None]:
        """Every stored step once, in batches of which the last may be shorter; call it again for another epoch."""
        self._computed("get")
        fields = _ROLLOUT_FIELDS.values()
        batches = self.core.minibatches(batch_size, shuffle=shuffle, fields=fields, device=self.device)
        return (RolloutBatch(**_renamed(_ROLLOUT_FIELDS, batch)) for batch in batches)

    def _computed(self, where: str, name: str = "advantage") -> torch.Tensor:
        """The advantages or returns of the stored steps."""
        data = self.core.data
        if name not in data.keys():
            remedy = "Call compute_returns_and_advantages first."
            raise NotReadyError(explain(where, "advantages and returns", "none", remedy))
        return data[name]

    @property
    def _advantages(self) -> torch.Tensor:
        return self._computed("advantages")

    @property
    def _returns(self) -> torch.Tensor:
        return self._computed("returns", "return")

    def normalize_advantages(self) -> None:
        """Give the advantages mean 0 and (population) deviation 1."""
        self.core.attach({"advantage": estimators.normalize(self._advantages, eps=1e-6, correction=0)})

    def normalize_returns(self) -> None:
        """Give the returns mean 0 and (population) deviation 1."""
        self.core.attach({"return": estimators.normalize(self._returns, eps=1e-6, correction=0)})

    @property
    def explained_variance(self) -> float:
        """How much of the variance of the returns the values explain."""
        return explained_variance(self.core["value"], self._returns)

    @property
    def advantages_mean(self) -> float:
        """The mean advantage."""
        return float(self._advantages.mean())

    @property
    def advantages_std(self) -> float:
        """The unbiased deviation of the advantages; 0 for a single one."""
        return _deviation(self._advantages)

    @property
    def returns_mean(self) -> float:
        """The mean return."""
        return float(self._returns.mean())

    @property
    def returns_std(self) -> float:
        """The unbiased deviation of the returns; 0 for a single one."""
        return _deviation(self._returns)


def _fields_of(memory: TensorDict) -> dict[str, Field]:
    return {name: Field(tuple(column.shape[2:]), column.dtype) for name, column in memory.items()}


def _renamed(names: Mapping[str, str], batch: TensorDict) -> dict[str, torch.Tensor]:
    return {theirs: batch[ours] for theirs, ours in names.items()}


def _deviation(x: torch.Tensor) -> float:
    return float(x.std()) if x.numel() > 1 else 0.0


class SumTree:
    """`capacity` priorities, written in a circle or by number, and found by their running sum."""

    def __init__(self, capacity: int) -> None:
        self.capacity = positive("capacity", capacity)
        self.data_pointer = 0
        self._tree = priority_tree(self.capacity, _CPU)

    @classmethod
    def _around(cls, tree: Any, capacity: int, data_pointer: int) -> SumTree:
        """The first leaves of a tree that somebody else has."""
        outside = cls.__new__(cls)
        outside.capacity, outside.data_pointer, outside._tree = capacity, data_pointer, tree
        return outside

    def add(self, priority: float) -> None:
        """Write the next priority, after the last one the first again."""
        self.update(self.data_pointer, priority)
        self.data_pointer = 0 if self.data_pointer + 1 == self.capacity else self.data_pointer + 1

    def update(self, idx: int, priority: float) -> None:
        """Change one priority."""
        if not 0 <= idx < self.capacity:
            raise IndexError(explain("idx", f"0 to {self.capacity - 1}", idx, "Number priorities from 0."))
        if not 0 <= priority < float("inf"):
            raise PriorityError(explain("priority", "a finite number of at least 0", priority, "Pass such a one."))
        self._tree.set(torch.tensor([idx], device=self._leaves.device), float(priority))

    def get(self, s: float) -> tuple[int, float]:
        """The first number whose running sum lies beyond `s`, and its priority; never one of priority 0."""
        ends = self._leaves.cumsum(0)
        if not ends[-1] > 0:
            raise NotReadyError(explain("get", "a priority above 0", "none", "Add one first."))
        last = self._leaves.nonzero()[-1]
        idx = torch.searchsorted(ends, ends.new_tensor([s]), right=True).minimum(last)
        return int(idx), float(self._leaves[idx])

    @property
    def total_priority(self) -> float:
        """The sum of all priorities."""
        return float(self._tree.total())

    @property
    def tree(self) -> np.ndarray:
        """A copy of the sums and leaves as a heap `[2 · capacity − 1]`: below i are 2i + 1 and 2i + 2."""
        heap = np.zeros(2 * self.capacity - 1)
        heap[self.capacity - 1 :] = self._leaves.cpu()
        for level in reversed(range(self.capacity.bit_length())):
            at = np.arange(2**level - 1, min(2 ** (level + 1), self.capacity) - 1)
            heap[at] = heap[2 * at + 1] + heap[2 * at + 2]
        return heap

    @property
    def _leaves(self) -> torch.Tensor:
        return self._tree.leaves_view()[: self.capacity]
