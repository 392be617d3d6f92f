"""rl-buffer's `SharedReplayBuffer` on relive's core."""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from relive.compat.rl_buffer.base_buffer import CPU, ResetStrategy
from relive.compat.rl_buffer.replay_buffer import TransitionBuffer
from relive.compat.rl_buffer.shared_base_buffer import SharedBaseBuffer
from relive.compat.rl_buffer.stats_tracker import StatsTracker
from relive.concurrent import Handle, connect
from relive.errors import explain
from relive.replay.buffer import ReplayBuffer as _Replay
from relive.storage import Memory

__all__ = ["SharedMemoryComponents", "SharedReplayBuffer", "SharedStates"]


@dataclass
class SharedMemoryComponents:
    """Handle of the main process's memory, small enough to send to a worker."""

    handle: Handle


@dataclass
class SharedStates:
    """Placeholder for rl-buffer's shared counters; it is empty, because the core counts in its shared memory."""


class SharedReplayBuffer(TransitionBuffer, SharedBaseBuffer):
    """A `ReplayBuffer` that the main process makes and workers on the same machine add to and draw from.

    A lock makes `add` atomic. Each process has a statistics tracker of its own steps; a worker may have none. The steps
    are in shared memory of the host; batches are moved to `device`. The buffer itself may be an argument of a new
    process, or be inherited by a fork.
    """

    def __init__(
        self, buffer_size: int, num_envs: int, obs_shape: Any, action_shape: tuple[int, ...],
        stats_tracker: StatsTracker | None, is_main_process: bool,
        shared_memory_components: SharedMemoryComponents | None = None, shared_states: SharedStates | None = None,
        obs_dtype: Any = torch.float32, action_dtype: torch.dtype = torch.float32, device: torch.device = CPU,
        store_device: torch.device | None = None, reset_strategy: ResetStrategy = ResetStrategy.RECURRENT, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        components = shared_memory_components
        if is_main_process and (components is not None or shared_states is not None):
            remedy = "Leave them out: the main process makes them."
            raise ValueError(explain("SharedReplayBuffer", "no shared components in the main process", "some", remedy))
        if not is_main_process and components is None:
            remedy = "Pass shared_memory_components= of the main process's buffer."
            expected = "the main process's shared components in a worker"
            raise ValueError(explain("SharedReplayBuffer", expected, None, remedy))
        if store_device is not None and torch.device(store_device) != CPU:
            remedy = "Leave it out: processes share the host's memory."
            raise ValueError(explain("store_device", "the host", store_device, remedy))
        super().__init__(buffer_size, num_envs, stats_tracker, device, CPU, reset_strategy)
        self._declare_core(obs_shape, action_shape, obs_dtype, action_dtype, Memory.shared(), seed)
        self._use_core(
            self._make() if components is None else connect(components.handle, seed=self._make.keywords["seed"])
        )

    def _use_core(self, core: _Replay) -> None:
        super()._use_core(core)
        self._process = os.getpid()

    @property
    def core(self) -> _Replay:
        """The relive buffer underneath."""
        # A forked child must not use its parent's handles, so it connects again.
        if self._process != os.getpid():
            self._use_core(connect(self._core.handle()))
        return self._core

    _derived_attributes = ("_places", "_process")

    def __getstate__(self) -> dict[str, Any]:
        """Return the steps; while a process is being spawned, return the handle of the shared memory instead."""
        core = self.core
        if get_spawning_popen() is None:
            return super().__getstate__()
        omitted_names = ("_core", *self._derived_attributes)
        return {**{name: x for name, x in vars(self).items() if name not in omitted_names}, "_core": core.handle()}

    def _set_derived_attributes(self) -> None:
        if isinstance(self._core, Handle):
            self._use_core(connect(self._core))
        else:
            super()._set_derived_attributes()

    def pos(self) -> int:
        """Return the number of stored time steps; in a full buffer, the row that is overwritten next."""
        return self._find_next_row() if self.full() else self.current_size

    def set_pos(self, value: int) -> None:
        """Remove every step if `value` is 0; raise for another new position."""
        if value == 0:
            self.core.clear()
        elif value != self.pos():
            raise ValueError(explain("set_pos", "0, which forgets every step", value, "Add steps with add."))

    def full(self) -> bool:
        """Whether the buffer is full: the next step triggers the reset strategy."""
        return len(self.core) == self.core.capacity

    def set_full(self, value: bool) -> None:
        """Remove every step of a full buffer if `value` is False; True raises unless the buffer is full."""
        if value and not self.full():
            raise ValueError(explain("set_full", "False, or a full buffer", value, "Add steps with add."))
        if self.full() and not value:
            self.core.clear()

    def get_shared_components(self) -> tuple[SharedMemoryComponents, SharedStates]:
        """Return the constructor arguments for workers."""
        return SharedMemoryComponents(self.core.handle()), SharedStates()
