"""The memory of one buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from relive.memory.mapped import zeros
from relive.memory.stream_lock import stream_lock


class Keeper(Protocol):
    """Makes what a buffer keeps outlast a kill, and what was committed the loss of power."""

    @property
    def is_open(self) -> bool:
        """Whether it is not closed yet."""
        ...

    def settle(self, owner: Any, *, resumes: bool) -> None:
        """The buffer is complete: make whole what was found; `resumes`: go on with the draws of the last commit."""
        ...

    def expect(self, steps: int) -> None:
        """So many steps are about to be written."""
        ...

    def commit(self) -> None:
        """Wait until everything is on the disk."""
        ...

    def refilled(self) -> AbstractContextManager[None]:
        """Held while all of it is replaced: a process that dies inside leaves nothing."""
        ...

    def in_order(self) -> AbstractContextManager[None]:
        """Held while rows are read one after the other, not here and there."""
        ...

    def close(self) -> None:
        """Commit, and let others have it."""
        ...


class Room(Protocol):
    """Arrays that are asked for by name, each once, and the lock that everybody who uses them takes."""

    device: torch.device
    name: str
    """What kind of memory this is: own, pinned, shared or disk."""
    is_found: bool
    """Somebody wrote here before: arrays come as they were left, not as zeros."""
    outlives: bool
    """The arrays outlive this process, which may die in the middle of a step."""

    @property
    def keeper(self) -> Keeper | None:
        """Who sees to it that the arrays outlive the machine's memory too."""
        ...

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
    keeper = None

    def __init__(self, device: torch.device, is_pinned: bool = False) -> None:
        self.device, self._is_pinned = device, is_pinned
        self.name = "pinned" if is_pinned else "own"

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            if self.device.type == "cpu" and not self._is_pinned:
                return zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=self.device, pin_memory=self._is_pinned)

    def lock(self, mend: Callable[[], None]) -> AbstractContextManager[Any]:
        return stream_lock(self.device) if self.device.type == "cuda" else threading.RLock()
