"""rl-buffer's `ReplayBuffer` on ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relive.compat.rl_buffer.base_buffer import CPU, BaseBuffer, ResetStrategy, refuse_full, tell
from relive.compat.rl_buffer.stats_tracker import StatsTracker
from relive.compat.rl_buffer.steps import declared
from relive.compat.rl_buffer.transitions import (
    REPLAY_FIELDS,
    ReplayBatch,
    Transitions,
    checked_batch,
    ends,
    maker,
    renamed,
)
from relive.compat.views import MemoryView
from relive.errors import explain
from relive.replay.buffer import ReplayBuffer as _Replay

__all__ = ["ReplayBatch", "ReplayBuffer"]


class ShownMemory:
    """The memory of a replay buffer, as rl-buffer's attributes."""

    _transitions: Any

    _observations = MemoryView("obs")
    _actions = MemoryView("action")
    _rewards = MemoryView("reward")
    _dones = MemoryView("terminated")
    _truncateds = MemoryView("truncated")
    _next_observations = MemoryView("next_obs")

    def _memory_of(self, field: str) -> Any:
        return self._transitions.memory[field]

    @property
    def core(self) -> _Replay:
        """The relive buffer underneath."""
        return self._transitions.core


class StoredTransitions(ShownMemory, BaseBuffer):
    """What the replay buffers of one process share: `add`, and the count of steps."""

    def _forget(self) -> None:
        self._at, self._is_full = 0, False
        if hasattr(self, "_transitions"):
            self.core.clear()

    @property
    def _pos(self) -> int:
        return self._at

    @_pos.setter
    def _pos(self, pos: int) -> None:
        if pos == 0:
            self._forget()
        elif pos != self._at:
            raise AttributeError(explain("_pos", "0, which forgets every step", pos, "Add steps with add."))

    @property
    def _full(self) -> bool:
        return self._is_full

    @_full.setter
    def _full(self, full: bool) -> None:
        if full and not self._is_full:
            raise AttributeError(explain("_full", "False, or a full buffer", full, "Add steps with add."))
        if self._is_full and not full:
            self._forget()

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        next_obs: Any,
        truncated: Any,
        infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> None:
        """Store one step of every environment.

        `done` says where an episode terminated and `truncated` where it was cut short, as bools or numbers. Without
        names `truncated` may also come before `next_obs`: their shapes tell, or the dtypes where an observation is one
        number.
        """
        refuse_full(self._is_full, self.reset_strategy)
        step = self._transitions.fitting(obs, action, reward, done, next_obs, truncated)
        if self._stats_tracker is not None:  # which may refuse the metrics, before anything is changed
            tell(self._stats_tracker, ends(step, self._stats_tracker), step[2], infos, done_reasons)
        if self._is_full and self.reset_strategy is ResetStrategy.AUTO:
            self.reset()
        self.core.add(*step)
        self._at = self._at % self._buffer_size + 1
        self._is_full = self._is_full or self._at == self._buffer_size

    def add_context(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raises: steps go into this buffer by `add`, which counts them."""
        raise TypeError(f"{type(self).__name__}.add_context: expected add(obs, …), got rows to be written by hand.")


class ReplayBuffer(StoredTransitions):
    """The newest `buffer_size` time steps of `num_envs` environments, drawn uniformly.

    `obs_shape` may be a dict of shapes (and `obs_dtype` a dict of dtypes): observations are TensorDicts then.
    """

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        obs_shape: Any,
        action_shape: tuple[int, ...],
        stats_tracker: StatsTracker,
        obs_dtype: Any = torch.float32,
        action_dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        store_device: torch.device | None = None,
        reset_strategy: ResetStrategy = ResetStrategy.RECURRENT,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(buffer_size, num_envs, stats_tracker, device, store_device, reset_strategy)
        self.obs_shape, self.action_shape = obs_shape, action_shape
        fields = declared(obs_shape, obs_dtype), declared(action_shape, action_dtype)
        self._transitions = Transitions(
            maker(self.total_capacity, num_envs, *fields, self.store_device, seed), obs_shape
        )

    def get(self, batch_size: int) -> ReplayBatch:
        """Transitions drawn with replacement, at most as many as are stored."""
        checked_batch(batch_size, self.total_current_size)
        return ReplayBatch(**renamed(REPLAY_FIELDS, self._transitions.sample(batch_size, self.device)))
