"""The common part of rl-buffer's shared buffers, whose `pos` and `full` are methods."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from relive.compat.rl_buffer.base_buffer import CPU, ResetStrategy, Sized
from relive.compat.rl_buffer.stats_tracker import StatsTracker


class SharedBaseBuffer(Sized, ABC):
    """Sizes, statistics and position of a buffer that several processes use; a worker may have no tracker."""

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        stats_tracker: StatsTracker | None,
        device: torch.device = CPU,
        store_device: torch.device | None = None,
        reset_strategy: ResetStrategy = ResetStrategy.ERROR,
    ) -> None:
        super().__init__(buffer_size, num_envs, device, store_device, reset_strategy)
        self._stats_tracker = stats_tracker

    @abstractmethod
    def pos(self) -> int:
        """The position of the next time step."""

    @abstractmethod
    def set_pos(self, value: int) -> None:
        """Let the next time step go elsewhere."""

    @abstractmethod
    def full(self) -> bool:
        """Whether the coming step meets the reset strategy."""

    @abstractmethod
    def set_full(self, value: bool) -> None:
        """Say whether all of the memory is stored steps."""

    def reset(self, reset_stats: bool = False) -> None:
        """Forget every step, and this process's statistics too if asked to."""
        self.set_pos(0)
        self.set_full(False)
        if reset_stats and self._stats_tracker is not None:
            self._stats_tracker.reset()

    @property
    def stats_tracker(self) -> StatsTracker | None:
        """This process's statistics of the steps that it adds; None in a worker without one."""
        return self._stats_tracker

    @property
    def current_size(self) -> int:
        """How many time steps are stored."""
        return self.capacity if self.full() else self.pos()
