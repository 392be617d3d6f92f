"""rl-buffer's `ReplayBuffer` on relive's core, and the base classes of its three replay buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from relive.compat.pickling import PicklableBuffer, restore_core
from relive.compat.rl_buffer.base_buffer import (
    CPU,
    BaseBuffer,
    ResetStrategy,
    SizedBuffer,
    check_not_full,
    fit_tree,
    update_stats,
)
from relive.compat.rl_buffer.stats_tracker import StatsTracker, to_numpy
from relive.compat.seeding import choose_seed
from relive.compat.views import as_bools, declare_spec, is_memory_shared, is_tree, make_memory_views
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer as _Replay
from relive.schema.assembly import to_device

__all__ = ["ReplayBatch", "ReplayBuffer"]


@dataclass
class ReplayBatch:
    """Transitions `[B]`."""

    observations: Any
    actions: torch.Tensor
    rewards: torch.Tensor
    dones: torch.Tensor
    truncateds: torch.Tensor
    next_observations: Any


REPLAY_FIELDS = {
    "observations": "obs", "actions": "action", "rewards": "reward", "dones": "terminated", "truncateds": "truncated",
    "next_observations": "next_obs",
}  # fmt: skip
"""Core's name of each field of a batch, in the order of the core's `add`."""


class TransitionBuffer(PicklableBuffer, SizedBuffer):
    """Base class of rl-buffer's replay buffers: `add`, `get`, pickling, and attributes that are the core's memory."""

    reset: Callable[..., None]

    _observations, _actions, _rewards = make_memory_views("obs", "action", "reward")
    _dones, _truncateds, _next_observations = make_memory_views("terminated", "truncated", "next_obs")

    def _get_memory(self, field: str) -> Any:
        return self.core.columns[field]

    @property
    def core(self) -> _Replay:
        """The relive buffer underneath."""
        return self._core

    @property
    def current_size(self) -> int:
        """Number of stored time steps."""
        return len(self.core) // self.num_envs

    def _find_next_row(self) -> int:
        """Return the row of the memory that is written next."""
        ids = self.core.ids()
        return (int(ids[-1]) // self.num_envs + 1) % self._buffer_size if len(ids) else 0

    def _declare_core(
        self, obs_shape: Any, action_shape: tuple[int, ...], obs_dtype: Any, action_dtype: torch.dtype, device: Any,
        seed: int | None, sampler: Any = None,
    ) -> None:  # fmt: skip
        """Set `_make`, a picklable function that makes the core."""
        self.obs_shape, self.action_shape = obs_shape, action_shape
        fields = declare_spec(obs_shape, obs_dtype), declare_spec(action_shape, action_dtype)
        # Next observations are stored, because with "shared" the last observation of each episode would occupy a row.
        settings = {"num_envs": self.num_envs, "next_obs": "stored", "sampler": sampler, "device": device}
        self._make = partial(_Replay, self.total_capacity, *fields, seed=choose_seed(seed), **settings)

    def _use_core(self, core: _Replay) -> None:
        self._core = core
        columns = core.columns
        self._places = [(name, columns[name][0]) for name in REPLAY_FIELDS.values()]

    def add(
        self, obs: Any, action: Any, reward: Any, done: Any, next_obs: Any, truncated: Any,
        infos: Mapping[str, Any] | None = None, done_reasons: Sequence[str | None] | None = None,
    ) -> None:  # fmt: skip
        """Store one step of every environment.

        `done` marks terminated episodes and `truncated` marks truncated episodes, as bools or numbers. As positional
        arguments `truncated` may come before `next_obs`: the two are told apart by shape, or by dtype if observations
        are scalars.
        """
        core, tracker = self.core, self._stats_tracker
        # Other processes and threads may add, too, so one lock covers the check and the write.
        with core._lock:
            is_full = self.reset_strategy is not ResetStrategy.RECURRENT and len(core) == core.capacity
            check_not_full(is_full, self.reset_strategy)
            step = self._convert_step(obs, action, reward, done, next_obs, truncated)
            # The tracker may refuse the metrics, so it is updated before the write.
            if tracker is not None:
                ended = to_numpy(step[3])
                if getattr(tracker, "truncated_ends", False) is True:
                    ended = ended | to_numpy(step[4])
                update_stats(tracker, ended, step[2], infos, done_reasons)
            # Only with the strategy AUTO does `check_not_full` let a full buffer pass, so it is emptied.
            if is_full:
                self.reset()
            core.add(*step)

    def _convert_step(self, obs: Any, action: Any, reward: Any, done: Any, next_obs: Any, truncated: Any) -> list[Any]:
        """Convert one step for the core. A caller may pass `truncated` and `next_obs` in either order."""
        if self._is_swapped(next_obs, truncated):
            next_obs, truncated = truncated, next_obs
        values = (obs, action, reward, as_bools(done), as_bools(truncated), next_obs)
        step = [fit_tree(name, value, place) for (name, place), value in zip(self._places, values, strict=True)]
        _refuse_shared_memory(step[0], step[5])
        return step

    def _is_swapped(self, next_obs: Any, truncated: Any) -> bool:
        """Return True if `next_obs` has the shape of flags; for scalar observations, if only `next_obs` has bools."""
        if self.obs_shape:
            return np.shape(next_obs) == (self.num_envs,) and not is_tree(next_obs)
        return _are_bools(next_obs) and not _are_bools(truncated) and self._places[0][1].dtype is not torch.bool

    def get(self, batch_size: int) -> ReplayBatch:
        """Draw transitions with replacement; `batch_size` is at most the number of stored transitions."""
        num_stored = len(self.core)
        if 0 < num_stored < batch_size:
            raise ValueError(f"Batch size {batch_size} is larger than available samples: {num_stored} are stored.")
        return ReplayBatch(**self._sample_batch(batch_size, REPLAY_FIELDS))

    def _sample_batch(self, batch_size: int, core_names: Mapping[str, str]) -> dict[str, Any]:
        """Draw a batch from the core, moved to `device`, under rl-buffer's names."""
        core = self.core
        if not len(core):
            raise ValueError("Cannot sample from empty buffer: add a step first.")
        batch = core.sample(batch_size)
        batch = batch if self.device == core.device else to_device(batch, self.device)
        return {name: batch[core_name] for name, core_name in core_names.items()}

    _derived_attributes = ("_places",)

    def _set_derived_attributes(self) -> None:
        self._use_core(restore_core(self._make(), self._core))


def _are_bools(value: Any) -> bool:
    return value.dtype is torch.bool if isinstance(value, torch.Tensor) else np.asarray(value).dtype == np.bool_


def _refuse_shared_memory(obs: Any, next_obs: Any) -> None:
    """Raise if `next_obs` shares memory with `obs`: the environment has overwritten `obs`."""
    if not isinstance(obs, torch.Tensor):
        for key in obs.keys():
            _refuse_shared_memory(obs[key], next_obs[key])
    elif is_memory_shared(obs, next_obs):
        remedy = "The environment reuses its array: pass copies."
        raise SchemaError(explain("next_obs", "memory apart from obs", "memory shared with obs", remedy))


class LocalReplayBuffer(TransitionBuffer, BaseBuffer):
    """Base class of the replay buffers of one process."""

    def _remove_steps(self) -> None:
        self.core.clear()

    @property
    def _pos(self) -> int:
        return (self._find_next_row() or self._buffer_size) if self._full else self.current_size

    @_pos.setter
    def _pos(self, pos: int) -> None:
        if pos == 0:
            self._remove_steps()
        elif pos != self._pos:
            raise AttributeError(explain("_pos", "0, which forgets every step", pos, "Add steps with add."))

    @property
    def _full(self) -> bool:
        return len(self.core) == self.core.capacity

    @_full.setter
    def _full(self, full: bool) -> None:
        if full and not self._full:
            raise AttributeError(explain("_full", "False, or a full buffer", full, "Add steps with add."))
        if self._full and not full:
            self._remove_steps()

    def add_context(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise a TypeError: steps are stored with `add`."""
        raise TypeError(f"{type(self).__name__}.add_context: expected add(obs, …), got rows to be written by hand.")


class ReplayBuffer(LocalReplayBuffer):
    """The newest `buffer_size` time steps of `num_envs` environments, drawn uniformly.

    `obs_shape` may be a dict of shapes (and `obs_dtype` a dict of dtypes): observations are then TensorDicts.
    """

    def __init__(
        self, buffer_size: int, num_envs: int, obs_shape: Any, action_shape: tuple[int, ...],
        stats_tracker: StatsTracker, obs_dtype: Any = torch.float32, action_dtype: torch.dtype = torch.float32,
        device: torch.device = CPU, store_device: torch.device | None = None,
        reset_strategy: ResetStrategy = ResetStrategy.RECURRENT, *, seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(buffer_size, num_envs, stats_tracker, device, store_device, reset_strategy)
        self._declare_core(obs_shape, action_shape, obs_dtype, action_dtype, self.store_device, seed)
        self._use_core(self._make())
