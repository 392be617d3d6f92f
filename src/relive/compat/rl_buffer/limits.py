"""What rl-buffer's buffers have in common, and what they do when they are full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from relive.compat.rl_buffer.statistics import StatsTracker, on_host
from relive.errors import SchemaError, explain
from relive.fields.conversion import conform, overlaps
from relive.fields.schema import Field, positive

CPU = torch.device("cpu")


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

    `core` is the relive buffer underneath.
    """

    core: Any
    _fields: dict[str, Field]
    """What the core stores, by its names."""

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        stats_tracker: StatsTracker,
        device: torch.device = CPU,
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
        terminated, truncated, rewards = (on_host(step[name]) for name in ("terminated", "truncated", "reward"))
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
            raise SchemaError(explain("next_obs", "memory apart from obs", "memory shared with obs", remedy))

    def _make_room(self) -> None:
        if self.reset_strategy is ResetStrategy.AUTO:
            self.reset()


def fields_of(memory: TensorDict) -> dict[str, Field]:
    """What one environment's step has in the columns of a buffer."""
    return {name: Field(tuple(column.shape[2:]), column.dtype) for name, column in memory.items()}


def renamed(names: Mapping[str, str], batch: TensorDict) -> dict[str, torch.Tensor]:
    """The leaves of a batch under rl-buffer's names."""
    return {theirs: batch[ours] for theirs, ours in names.items()}
