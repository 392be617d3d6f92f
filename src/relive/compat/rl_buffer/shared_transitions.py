"""Transitions in memory that several processes use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any

from relive.compat.rl_buffer.transitions import Transitions
from relive.concurrent import Handle, connect
from relive.replay.buffer import ReplayBuffer as _Replay


class SharedTransitions(Transitions):
    """Transitions in the memory that `make` makes, or in that of another process, which `handle` names.

    A process that is started with them uses the same memory; any other copy has memory of its own.
    """

    def __init__(
        self, make: Callable[[], _Replay], obs_shape: Any, handle: Handle | None = None, seed: int | None = None
    ) -> None:
        super().__init__(make if handle is None else partial(connect, handle, seed=seed), obs_shape)
        self._make = make

    def joined(self) -> SharedTransitions:
        """The same memory for a forked child, which must not use what its parent opened."""
        return SharedTransitions(self._make, self._obs_shape, self.core.handle())

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return super().__getstate__()
        return {"make": self._make, "obs_shape": self._obs_shape, "handle": self.core.handle()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        if "handle" in state:
            self.__init__(**state)
        else:
            super().__setstate__(state)
