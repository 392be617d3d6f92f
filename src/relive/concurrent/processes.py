"""Handles of shared replay buffers, with which several processes of one machine use the same buffer."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.storage.shared import SharedAddress, SharedAllocator

_HANDLE_SETTINGS = {"obs", "action", "reward", "capacity", "num_envs", "extra", "sampler", "next_obs", "autoreset"}


@dataclass(frozen=True)
class Handle:
    """The address and the settings of a shared replay buffer, for another process of this machine."""

    address: SharedAddress
    settings: Mapping[str, Any] = field(repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        sampler = self.settings.get("sampler")
        try:
            pickle.dumps(sampler)
        except Exception as error:
            expected = "a sampler that can be sent to another process"
            remedy = (
                "Pass beta=rl.Linear(start, end, draws) in place of a function, or define the function in a module."
            )
            raise SchemaError(explain("handle", expected, f"{sampler!r} ({error})", remedy)) from error
        return Handle, (self.address, self.settings)


def make_handle(replay: ReplayBuffer) -> Handle:
    """Return the handle of a buffer in shared memory; `ReplayBuffer.handle` calls this."""
    allocator = replay.storage.allocator
    if not isinstance(allocator, SharedAllocator):
        remedy = "Make the buffer with device=rl.Memory.shared()."
        raise SchemaError(explain("handle", "a buffer in shared memory", f"a buffer on {replay.device}", remedy))
    trees, names = replay._schema.trees, ("obs", "action", "reward")
    settings = {
        **{name: trees[name] for name in names},
        "capacity": replay.capacity,
        "num_envs": replay.num_envs,
        "extra": {name: tree for name, tree in trees.items() if name not in (*names, "terminated", "truncated")},
        "sampler": replay.unbound_sampler,
        "next_obs": replay.next_obs,
        "autoreset": replay.autoreset,
    }
    return Handle(allocator.address, settings)


def connect(handle: Handle, *, seed: int | None = None) -> ReplayBuffer:
    """Return a buffer of this process that shares the rows, priorities and ids of the buffer of `handle`.

    Each process has its own draws, epochs and staged fields; drawn rows of all processes are counted together. The
    process that made the handle must be alive during this call; the memory is freed with the last process that uses it.

    Args:
        handle: result of `replay.handle()` in the other process.
        seed: seed of this process's draws; None takes one from the system.
    """
    if not isinstance(handle, Handle):
        raise SchemaError(explain("connect", "a handle", repr(handle), "Pass replay.handle()."))
    settings = handle.settings if isinstance(handle.settings, Mapping) else None
    if not isinstance(handle.address, SharedAddress) or settings is None or set(settings) != _HANDLE_SETTINGS:
        got = sorted(map(str, settings)) if settings is not None else type(handle.settings).__name__
        remedy = "Pass the handle as replay.handle() made it."
        raise SchemaError(explain("connect", f"an address and the settings {sorted(_HANDLE_SETTINGS)}", got, remedy))
    return ReplayBuffer(**settings, device=handle.address.memory, seed=seed)
