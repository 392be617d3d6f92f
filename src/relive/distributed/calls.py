"""Calls to shards that end in time: with a result, with the shard's error, or with ShardUnavailable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from relive.errors import ShardUnavailable, explain

_PAUSE = 0.1
"""Seconds between two attempts to call a shard that is restarting."""


class Interrupted(Exception):
    """The shard's process ended before it answered; it may or may not have done the work."""


class Calls:
    """One client's calls to the shards of a service."""

    def __init__(self, service: str, actors: list[Any], timeout: float) -> None:
        self._service, self._actors, self._timeout = service, actors, timeout

    def deadline(self) -> float:
        """The time by which a call that starts now must end."""
        return time.monotonic() + self._timeout

    def start(self, shard: int, verb: str, *arguments: Any) -> Any:
        """Start a call, without waiting; returns the reference to its answer."""
        return getattr(self._actors[shard], verb).remote(*arguments)

    def is_answered(self, ref: Any) -> bool:
        """Whether the answer is here, so that `fetch` would not wait."""
        return bool(ray.wait([ref], timeout=0)[0])

    def fetch(self, shard: int, ref: Any, deadline: float) -> Any:
        """Wait for the answer of a call."""
        try:
            return ray.get(ref, timeout=max(deadline - time.monotonic(), 0.0))
        except GetTimeoutError:
            raise self.late(shard) from None
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, Exception) else error) from None
        except ActorDiedError:
            remedy = "Start the service again: it was closed, or had no checkpoint to restart from."
            raise self._unavailable(
                shard, "a running process", "a process that has ended", remedy, retry=False
            ) from None
        except RayError as error:
            # A shard that keeps dying interrupts every call, so the deadline must be checked here too.
            raise (Interrupted() if time.monotonic() < deadline else self.late(shard)) from error

    def ask(self, verb: str, arguments: Mapping[int, tuple[Any, ...]], deadline: float) -> dict[int, Any]:
        """Call several shards at once, and repeat a call if its shard restarts: the call must be safe to repeat."""
        refs = {shard: self.start(shard, verb, *each) for shard, each in arguments.items()}
        return {shard: self._insist(shard, ref, deadline, verb, *arguments[shard]) for shard, ref in refs.items()}

    def ask_all(self, verb: str, deadline: float) -> list[Any]:
        """Call every shard without arguments."""
        return list(self.ask(verb, dict.fromkeys(range(len(self._actors)), ()), deadline).values())

    def _insist(self, shard: int, ref: Any, deadline: float, verb: str, *arguments: Any) -> Any:
        while True:
            try:
                return self.fetch(shard, ref, deadline)
            except Interrupted:
                time.sleep(_PAUSE)
                ref = self.start(shard, verb, *arguments)

    def late(self, shard: int) -> ShardUnavailable:
        """The error for a shard that has not answered in time."""
        remedy = "Try again; the shard may be starting or busy."
        return self._unavailable(shard, f"an answer within {self._timeout:g} s", "no answer", remedy, retry=True)

    def _unavailable(self, shard: int, expected: str, got: str, remedy: str, *, retry: bool) -> ShardUnavailable:
        where = f"shard {shard} of {self._service!r}"
        return ShardUnavailable(explain(where, expected, got, remedy), retry)

    def end(self) -> None:
        """End the processes for good, and wait until they are gone."""
        for actor in self._actors:
            ray.kill(actor)
        deadline = self.deadline()
        for shard in range(len(self._actors)):
            with suppress(ShardUnavailable):  # raised by a process that is gone
                while time.monotonic() < deadline:
                    self._insist(shard, self.start(shard, "plan"), deadline, "plan")
                    time.sleep(_PAUSE)
