"""Calls to shards that always end in time: with a result, with what the shard raised, or as a shard unavailable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from relive.errors import ShardUnavailable, explain

NAMESPACE = "relive"
"""Names of services are looked for here, whatever job asks."""

_PAUSE = 0.1
"""Seconds between two attempts at a shard that is starting again."""


class Interrupted(Exception):
    """The shard's process ended before it answered: nobody knows whether it has done what it was asked."""


def actor_name(service: str, shard: int) -> str:
    """What the process of a shard is called."""
    return f"{service}/{shard}"


class Calls:
    """The shards of one service, as one client reaches them."""

    def __init__(self, service: str, actors: list[Any], timeout: float) -> None:
        self._service, self._actors, self._timeout = service, actors, timeout

    def deadline(self) -> float:
        """When a call that starts now has to end."""
        return time.monotonic() + self._timeout

    def start(self, shard: int, verb: str, *arguments: Any) -> Any:
        """Ask, and do not wait."""
        return getattr(self._actors[shard], verb).remote(*arguments)

    def is_answered(self, ref: Any) -> bool:
        """Whether `fetch` would not wait."""
        return bool(ray.wait([ref], timeout=0)[0])

    def fetch(self, shard: int, ref: Any, deadline: float) -> Any:
        """The answer to what was asked."""
        try:
            return ray.get(ref, timeout=max(deadline - time.monotonic(), 0.0))
        except GetTimeoutError:
            raise self.late(shard) from None
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, Exception) else error) from None
        except ActorDiedError:
            remedy = "Start the service again: it was closed, or had no checkpoint to restart from."
            raise self._unavailable(shard, "a running process", "a dead one", remedy, retry=False) from None
        except RayError as error:
            # Whoever asks again and again at a shard that keeps on dying comes past here.
            raise (Interrupted() if time.monotonic() < deadline else self.late(shard)) from error

    def ask(self, verb: str, arguments: Mapping[int, tuple[Any, ...]], deadline: float) -> dict[int, Any]:
        """Ask several shards at once (what may be asked twice), again if one starts anew meanwhile."""
        refs = {shard: self.start(shard, verb, *each) for shard, each in arguments.items()}
        return {shard: self._insist(shard, ref, deadline, verb, *arguments[shard]) for shard, ref in refs.items()}

    def ask_all(self, verb: str, deadline: float) -> list[Any]:
        """Ask every shard the same."""
        return list(self.ask(verb, dict.fromkeys(range(len(self._actors)), ()), deadline).values())

    def _insist(self, shard: int, ref: Any, deadline: float, verb: str, *arguments: Any) -> Any:
        while True:
            try:
                return self.fetch(shard, ref, deadline)
            except Interrupted:
                time.sleep(_PAUSE)
                ref = self.start(shard, verb, *arguments)

    def late(self, shard: int) -> ShardUnavailable:
        """What is raised when a shard has not answered in time."""
        remedy = "Try again; the shard may be starting or busy."
        return self._unavailable(shard, f"an answer within {self._timeout:g} s", "no answer", remedy, retry=True)

    def _unavailable(self, shard: int, expected: str, got: str, remedy: str, *, retry: bool) -> ShardUnavailable:
        where = f"shard {shard} of {self._service!r}"
        return ShardUnavailable(explain(where, expected, got, remedy), retry)

    def end(self) -> None:
        """End the processes, and wait until they are gone; nobody starts them again."""
        for actor in self._actors:
            ray.kill(actor)
        deadline = self.deadline()
        for shard in range(len(self._actors)):
            with suppress(ShardUnavailable):  # what a process that is gone answers
                while time.monotonic() < deadline:
                    self._insist(shard, self.start(shard, "plan"), deadline, "plan")
                    time.sleep(_PAUSE)
