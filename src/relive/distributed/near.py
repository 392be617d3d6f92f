"""Shards whose memory is on the client's own machine are read there, without a call."""

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
from relive.distributed.identity import Identity
from relive.distributed.plan import Plan
from relive.distributed.reading import Reading
from relive.errors import SchemaError

_LOOKS_AGAIN = 5.0
"""Seconds after which the memory of a shard that could not be read here is looked for again."""


class Whereabouts(NamedTuple):
    """Where the memory of a shard is, for other processes of its machine."""

    process: int
    handle: Handle
    identity: Identity


class Reader:
    """How a client reads shards: in place if they are on this machine, by calls otherwise.

    What is read in place is a living shard's: one whose process has ended is called, and so waited for, before its new
    memory is looked for. One that could not be read in place, as its process ended just then or is on another machine,
    is called for a while, and then looked for again: it may have started anew, and here.
    """

    def __init__(self, calls: Calls, plan: Plan, seed: int | None) -> None:
        self._calls, self._plan, self._seed = calls, plan, seed
        self._near: dict[int, _Near | None] = {}
        self._looked: dict[int, float] = {}
        """When each shard's memory was last looked for."""

    def ask(self, verb: str, arguments: dict[int, tuple[Any, ...]], deadline: float) -> dict[int, Any]:
        """The answers of these shards."""
        near = {shard: self._look(shard, deadline) for shard in arguments}
        far = self._calls.ask(verb, {shard: each for shard, each in arguments.items() if near[shard] is None}, deadline)
        return {
            shard: far[shard] if reading is None else self._ask_here(shard, reading, deadline, verb, arguments[shard])
            for shard, reading in near.items()
        }

    def _ask_here(self, shard: int, reading: Reading, deadline: float, verb: str, arguments: tuple[Any, ...]) -> Any:
        with reading.lock.within(deadline - time.monotonic()) as is_ours:
            if not is_ours:  # as while a large shard is being saved
                raise self._calls.late(shard)
            return getattr(reading, verb)(*arguments)

    def ask_all(self, verb: str, deadline: float) -> list[Any]:
        """The answers of all shards."""
        return list(self.ask(verb, dict.fromkeys(range(self._plan.num_shards), ()), deadline).values())

    @property
    def in_place(self) -> int:
        """How many shards were last read without a call."""
        return sum(near is not None for near in self._near.values())

    def _look(self, shard: int, deadline: float) -> Reading | None:
        """The shard's memory, if it can be read here."""
        near = self._near.get(shard)
        if self._is_due(shard) if near is None else not near.is_alive:
            found = self._calls.ask("whereabouts", {shard: ()}, deadline)[shard]
            near = self._near[shard] = self._opened(found, shard)
            self._looked[shard] = time.monotonic()
        return None if near is None else near.reading

    def _is_due(self, shard: int) -> bool:
        return time.monotonic() - self._looked.get(shard, -math.inf) > _LOOKS_AGAIN

    def _opened(self, found: Whereabouts | None, shard: int) -> _Near | None:
        if found is None or not hasattr(os, "pidfd_open"):
            return None
        key = [0 if self._seed is None else self._seed, shard, found.identity.life]
        seed = None if self._seed is None else int(np.random.SeedSequence(key).generate_state(1)[0])
        with suppress(ConnectionError, SchemaError, OSError):  # on another machine, or nobody's business here
            return _Near(found.process, Reading(self._plan, connect(found.handle, seed=seed), found.identity))
        return None


class _Near:
    """A shard of this machine, and whether its process lives."""

    def __init__(self, process: int, reading: Reading) -> None:
        self.reading = reading
        self._ended = os.pidfd_open(process)
        weakref.finalize(self, os.close, self._ended)

    @property
    def is_alive(self) -> bool:
        poll = select.poll()  # one is not for several threads
        poll.register(self._ended, select.POLLIN)
        return not poll.poll(0)
