"""Reading shards as a client: directly in memory if they are on this machine, otherwise by calls."""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from relive.concurrent.processes import Handle, connect
from relive.distributed.calls import Calls
from relive.distributed.plan import Plan
from relive.distributed.shard_ids import ShardIds
from relive.distributed.shard_reader import ShardReader
from relive.errors import SchemaError

_RETRY_SECONDS = 5.0
"""Seconds after which a client tries again to open the memory of a shard."""


class MemoryLocation(NamedTuple):
    """How other processes of a shard's machine open its memory."""

    process: int
    handle: Handle
    ids: ShardIds


class ClientReader:
    """Reads shards in place if they are on this machine, and by calls otherwise.

    Only the memory of a living shard is read. If its process has ended, the client calls the shard, which waits for the
    restart, and opens the new memory. A shard whose memory could not be opened, because its process had just ended or
    is on another machine, is read by calls for a while; then the client tries again, as it may have restarted here.
    """

    may_read_in_place = True
    """Benchmarks set it to False to measure calls."""

    def __init__(self, calls: Calls, plan: Plan, seed: int | None) -> None:
        self._calls, self._plan, self._seed = calls, plan, seed
        self._local: dict[int, _LocalShard | None] = {}
        self._tried: dict[int, float] = {}
        """When the client last tried to open each shard's memory."""

    def ask(self, verb: str, arguments: dict[int, tuple[Any, ...]], deadline: float) -> dict[int, Any]:
        """The answers of the shards to `verb` with their arguments."""
        local = {shard: self._local_reader(shard, deadline) for shard in arguments}
        remote = {shard: each for shard, each in arguments.items() if local[shard] is None}
        answers = self._calls.ask(verb, remote, deadline)
        for shard, reader in local.items():
            if reader is not None:
                answers[shard] = self._ask_here(shard, reader, deadline, verb, arguments[shard])
        return {shard: answers[shard] for shard in arguments}

    def _ask_here(self, shard: int, reader: ShardReader, deadline: float, verb: str, arguments: tuple[Any, ...]) -> Any:
        with reader.lock.within(deadline - time.monotonic()) as is_locked:
            if not is_locked:  # for example while a large shard is being saved
                raise self._calls.late(shard)
            return getattr(reader, verb)(*arguments)

    def ask_all(self, verb: str, deadline: float) -> list[Any]:
        """The answers of all shards to `verb`."""
        return list(self.ask(verb, dict.fromkeys(range(self._plan.num_shards), ()), deadline).values())

    @property
    def in_place(self) -> int:
        """The number of shards whose memory is open in this process."""
        return sum(local is not None for local in self._local.values())

    def _local_reader(self, shard: int, deadline: float) -> ShardReader | None:
        """A reader of the shard's memory, if it can be read here."""
        local = self._local.get(shard)
        if self._is_due(shard) if local is None else not local.is_alive:
            location = self._calls.ask("memory_location", {shard: ()}, deadline)[shard]
            local = self._local[shard] = self._open(location, shard)
            self._tried[shard] = time.monotonic()
        return None if local is None else local.reader

    def _is_due(self, shard: int) -> bool:
        waited = time.monotonic() - self._tried.get(shard, -math.inf)
        return self.may_read_in_place and waited > _RETRY_SECONDS

    def _open(self, location: MemoryLocation | None, shard: int) -> _LocalShard | None:
        if location is None or not hasattr(os, "pidfd_open"):
            return None
        key = [0 if self._seed is None else self._seed, shard, location.ids.life]
        seed = None if self._seed is None else int(np.random.SeedSequence(key).generate_state(1)[0])
        with suppress(ConnectionError, SchemaError, OSError):  # the memory is on another machine, or not accessible
            reader = ShardReader(self._plan, connect(location.handle, seed=seed), location.ids)
            return _LocalShard(location.process, reader)
        return None


class _LocalShard:
    """A shard of this machine, whose process may end."""

    def __init__(self, process: int, reader: ShardReader) -> None:
        self.reader = reader
        self._ended = os.pidfd_open(process)
        weakref.finalize(self, os.close, self._ended)

    @property
    def is_alive(self) -> bool:
        poll = select.poll()  # threads cannot share one
        poll.register(self._ended, select.POLLIN)
        return not poll.poll(0)
