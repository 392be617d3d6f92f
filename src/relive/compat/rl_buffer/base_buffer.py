"""The common part of rl-buffer's buffers: sizes in time steps, statistics, full buffers, and values of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch

from relive.compat.rl_buffer.stats_tracker import on_host
from relive.compat.step_rows import fit
from relive.compat.views import is_tree
from relive.schema.checks import positive, same_keys

CPU = torch.device("cpu")
_TENSOR: Any = torch.Tensor


class ResetStrategy(Enum):
    """The way that `add` treats a full buffer."""

    ERROR = "error"
    """Raise a RuntimeError."""
    RECURRENT = "recurrent"
    """Let the newest step replace the oldest one."""
    AUTO = "auto"
    """Forget everything and start again."""


class Sized:
    """Sizes in time steps and in transitions, devices, statistics and the reset strategy of a buffer."""

    current_size: Any
    """Number of stored time steps."""

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        stats_tracker: Any,
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
    def stats_tracker(self) -> Any:
        """Statistics of the steps that this process adds; None in a worker without a tracker."""
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
    def total_current_size(self) -> int:
        """How many transitions are stored."""
        return self.current_size * self.num_envs

    def __len__(self) -> int:
        """How many time steps are stored."""
        return self.current_size


class BaseBuffer(Sized):
    """A buffer with sizes in time steps, statistics, and a strategy for when it is full.

    A buffer of your own keeps its tensors itself and writes them in `add_context`.
    """

    _pos: Any = 0
    """Number of stored time steps; in a full ring, the position after the newest one."""
    _full: Any = False

    def _forget(self) -> None:
        self._pos, self._full = 0, False

    @property
    def current_size(self) -> int:
        """How many time steps are stored."""
        return self._buffer_size if self._full else self._pos

    @property
    def full(self) -> bool:
        """Whether the coming step meets the reset strategy."""
        return self._full

    def reset(self, reset_stats: bool = False) -> None:
        """Forget every step, and the statistics too if asked to."""
        self._forget()
        if reset_stats:
            self.stats_tracker.reset()

    @contextmanager
    def add_context(
        self,
        done: Any,
        reward: Any,
        infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> Iterator[int]:
        """The position for one step of a buffer that keeps its tensors itself; a step that raises is not counted.

        `RECURRENT` goes round: the position after the last one is 0, then 1.
        """
        refuse_full(self.full, self.reset_strategy)
        if self.full and self.reset_strategy is ResetStrategy.AUTO:
            self.reset()
        pos = self._pos % self._buffer_size
        yield pos
        track(self._stats_tracker, on_host(done) != 0, reward, infos, done_reasons)
        self._pos, self._full = pos + 1, self._full or pos + 1 == self._buffer_size


def refuse_full(is_full: bool, strategy: ResetStrategy) -> None:
    """rl-buffer's error for a step too many."""
    if is_full and strategy is ResetStrategy.ERROR:
        raise RuntimeError("Buffer is full. Call reset(), or choose another reset_strategy than ERROR.")


def track(
    tracker: Any, dones: Any, rewards: Any, infos: Mapping[str, Any] | None, done_reasons: Sequence[str | None] | None
) -> None:
    """Count a step in the statistics."""
    infos = {} if infos is None else infos
    reasons = [] if done_reasons is None else list(done_reasons)
    tracker.update(dones=dones, rewards=on_host(rewards), infos=infos, done_reasons=reasons)


def fit_tree(name: str, value: Any, place: Any) -> Any:
    """A value, or a dict of them, as tensors that fit a row `place` [N, …] of the memory."""
    fits = type(value) is type(place) is _TENSOR and value.shape == place.shape
    if fits and value.dtype is place.dtype and value.device == place.device and not value.requires_grad:
        return value
    if not is_tree(place):
        return fit(name, value, place)
    same_keys(name, value, place.keys())
    return {key: fit_tree(f"{name}.{key}", value[key], place[key]) for key in place.keys()}


def flags(value: Any) -> Any:
    """Numbers or bools as bools: everything but zero is true."""
    if isinstance(value, torch.Tensor):
        return value if value.dtype is torch.bool else value != 0
    return np.asarray(value) != 0
