"""The common part of rl-buffer's shared buffers, whose `pos` and `full` are methods."""

from __future__ import annotations

from abc import ABC, abstractmethod

from relive.compat.rl_buffer.base_buffer import Sized


class SharedBaseBuffer(Sized, ABC):
    """Sizes, statistics and position of a buffer that several processes use; a worker may have no tracker."""

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
    def current_size(self) -> int:
        """How many time steps are stored."""
        return self.capacity if self.full() else self.pos()
