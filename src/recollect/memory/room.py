"""The memory of one buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Room(Protocol):
    """Arrays that are asked for by name, each once, and the lock that everybody who uses them takes."""

    device: torch.device
    is_found: bool
    """Somebody wrote here before: arrays come as they were left, not as zeros."""
    outlives: bool
    """The arrays outlive this process, which may die in the middle of a step."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The array called `name`, to be written in any mode."""
        ...

    def lock(self, mend: Callable[[], None]) -> AbstractContextManager[Any]:
        """A re-entrant lock; `mend` is called when the last holder died, before anybody else goes on."""
        ...


class Heap:
    """Memory of this process alone."""

    is_found = False
    outlives = False

    def __init__(self, device: torch.device, is_pinned: bool = False) -> None:
        self.device, self._is_pinned = device, is_pinned

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.device, pin_memory=self._is_pinned)

    def lock(self, mend: Callable[[], None]) -> AbstractContextManager[Any]:
        return threading.RLock()
