"""Base class of rl-buffer's shared buffers, whose `pos` and `full` are methods."""

from __future__ import annotations

from abc import ABC, abstractmethod

from relive.compat.rl_buffer.base_buffer import SizedBuffer


class SharedBaseBuffer(SizedBuffer, ABC):
    """Base class of buffers that several processes use; a worker may have no statistics tracker."""

    @abstractmethod
    def pos(self) -> int:
        """Return the number of the row that is written next."""

    @abstractmethod
    def set_pos(self, value: int) -> None:
        """Set the number of the row that is written next."""

    @abstractmethod
    def full(self) -> bool:
        """Whether the buffer is full: the next step triggers the reset strategy."""

    @abstractmethod
    def set_full(self, value: bool) -> None:
        """Set whether the buffer is full."""

    def reset(self, reset_stats: bool = False) -> None:
        """Remove every step; `reset_stats` also resets this process's statistics."""
        self.set_pos(0)
        self.set_full(False)
        if reset_stats and self._stats_tracker is not None:
            self._stats_tracker.reset()

    @property
    def current_size(self) -> int:
        """Number of stored time steps."""
        return self.capacity if self.full() else self.pos()
