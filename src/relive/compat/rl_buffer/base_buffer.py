"""Base classes of rl-buffer's buffers, the strategies for a full buffer, and the conversion of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from relive.compat.rl_buffer.stats_tracker import to_numpy
from relive.compat.step_rows import fit_value
from relive.schema.checks import check_keys, check_positive_int

CPU = torch.device("cpu")
_TENSOR: Any = torch.Tensor


class ResetStrategy(Enum):
    """The behaviour of `add` when the buffer is full."""

    ERROR = "error"
    """`add` to a full buffer raises a RuntimeError."""
    RECURRENT = "recurrent"
    """`add` to a full buffer overwrites the oldest step."""
    AUTO = "auto"
    """`add` to a full buffer removes all steps first."""


class SizedBuffer:
    """Base class of all buffers: sizes in time steps and in transitions, devices, statistics and reset strategy."""

    current_size: Any
    """Number of stored time steps."""

    def __init__(
        self, buffer_size: int, num_envs: int, stats_tracker: Any, device: torch.device = CPU,
        store_device: torch.device | None = None, reset_strategy: ResetStrategy = ResetStrategy.ERROR,
    ) -> None:  # fmt: skip
        self._buffer_size = check_positive_int("buffer_size", buffer_size)
        self.num_envs = check_positive_int("num_envs", num_envs)
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
        """Capacity in time steps."""
        return self._buffer_size

    @property
    def total_capacity(self) -> int:
        """Capacity in transitions."""
        return self._buffer_size * self.num_envs

    @property
    def total_current_size(self) -> int:
        """Number of stored transitions."""
        return self.current_size * self.num_envs

    def __len__(self) -> int:
        """Number of stored time steps."""
        return self.current_size


class BaseBuffer(SizedBuffer):
    """Base class of the buffers of one process.

    Your own subclass allocates tensors and writes a step into them inside `with self.add_context(…) as row:`.
    """

    _pos: Any = 0
    """Number of the row after the newest step, from 1 to the capacity; 0 in an empty buffer."""
    _full: Any = False

    def _remove_steps(self) -> None:
        self._pos, self._full = 0, False

    @property
    def current_size(self) -> int:
        """Number of stored time steps."""
        return self._buffer_size if self._full else self._pos

    @property
    def full(self) -> bool:
        """Whether the buffer is full: the next step triggers the reset strategy."""
        return self._full

    def reset(self, reset_stats: bool = False) -> None:
        """Remove every step; `reset_stats` also resets the statistics."""
        self._remove_steps()
        if reset_stats:
            self.stats_tracker.reset()

    @contextmanager
    def add_context(
        self, done: Any, reward: Any, infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> Iterator[int]:  # fmt: skip
        """Yield the row of the next step, for a subclass with its own tensors; a block that raises stores no step.

        With `RECURRENT` row 0 follows the last row.
        """
        check_not_full(self.full, self.reset_strategy)
        if self.full and self.reset_strategy is ResetStrategy.AUTO:
            self.reset()
        pos = self._pos % self._buffer_size
        yield pos
        update_stats(self._stats_tracker, to_numpy(done) != 0, reward, infos, done_reasons)
        self._pos, self._full = pos + 1, self._full or pos + 1 == self._buffer_size


def check_not_full(is_full: bool, strategy: ResetStrategy) -> None:
    """Raise rl-buffer's error if the buffer is full and the strategy is `ResetStrategy.ERROR`."""
    if is_full and strategy is ResetStrategy.ERROR:
        raise RuntimeError("Buffer is full. Call reset(), or choose another reset_strategy than ERROR.")


def update_stats(
    tracker: Any, dones: Any, rewards: Any, infos: Mapping[str, Any] | None, done_reasons: Sequence[str | None] | None
) -> None:
    """Pass one step to a statistics tracker."""
    infos = {} if infos is None else infos
    reasons = [] if done_reasons is None else list(done_reasons)
    tracker.update(dones=dones, rewards=to_numpy(rewards), infos=infos, done_reasons=reasons)


def fit_tree(name: str, value: Any, row: Any) -> Any:
    """Convert a value, or a dict of values, to tensors with the shapes, dtypes and devices of `row` [N, …]."""
    if type(row) is _TENSOR:
        # `fit_value` makes this check, too; a call for each of the six fields would take 5 % of the time of `add`.
        fits = type(value) is _TENSOR and value.shape == row.shape and value.dtype is row.dtype
        return value if fits and value.device == row.device and not value.requires_grad else fit_value(name, value, row)
    check_keys(name, value, row.keys())
    return {key: fit_tree(f"{name}.{key}", value[key], row[key]) for key in row.keys()}
