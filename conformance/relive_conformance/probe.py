"""A replay buffer under test, with one interface for all adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from relive_conformance.adapters.off_policy import Array, NotOffered, ReplayBatch, Transitions
from relive_conformance.outcome import Differs

T = TypeVar("T")

BATCH = 32
"""Maximum rows per batch; fewer if fewer are stored, because some libraries never draw more than they hold."""


def require(capability: T | None, what: str) -> T:
    """Return a capability of an adapter; raise a `NotOffered` with its name if it is None."""
    if capability is None:
        raise NotOffered(f"no {what}")
    return capability


class Probe:
    """Adds steps and draws rows; an adapter without `prepare` and `read` takes `Transitions` and returns our names."""

    def __init__(self, replay: Any) -> None:
        self.replay = replay
        self._prepare: Callable[[Transitions], Any] = getattr(replay, "prepare", _identity)
        self._read: Callable[[Any], Any] = getattr(replay, "read", _identity)
        self.native: Any = None
        """The newest batch in the library's own form."""

    def verb(self, name: str) -> Callable[..., Any]:
        """Return an optional method of the adapter; raise `NotOffered` if it is missing."""
        return require(getattr(self.replay, name, None), f"`{name}`")

    def promise(self, name: str) -> Any:
        """Return a class attribute of the adapter, or None."""
        return getattr(self.replay, name, None)

    def add(self, step: Transitions) -> None:
        """Add one step of all environments."""
        self.replay.add(self._prepare(step))

    def add_all(self, steps: Iterable[Transitions]) -> Probe:
        """Add several steps, one after the other."""
        for step in steps:
            self.add(step)
        return self

    def add_raw(self, step: Transitions) -> None:
        """Add one step with its shapes unchanged."""
        self.replay.add(getattr(self.replay, "raw", self._prepare)(step))

    def sample(self, batch_size: int) -> ReplayBatch:
        """Draw one batch, as arrays under our names."""
        self.native = self.replay.sample(batch_size)
        read = self._read(self.native)
        named = read if isinstance(read, Mapping) else read._asdict()
        fields = {name: named[name] for name in ReplayBatch._fields if named.get(name) is not None}
        return ReplayBatch(**{name: np.asarray(array) for name, array in fields.items()})

    def draw(self, count: int) -> ReplayBatch:
        """Draw at least `count` rows, in several batches."""
        size = min(BATCH, self.stored)
        batches = [self.sample(size) for _ in range(-(-count // size))]
        for batch in batches:
            if len(batch.obs) != size:
                raise Differs(f"a batch of {size} rows", f"{len(batch.obs)} rows")
        return ReplayBatch(*(_concatenate(leaves) for leaves in zip(*batches, strict=True)))

    @property
    def stored(self) -> int:
        """The number of transitions that can be drawn."""
        stored = getattr(self.replay, "stored", None)
        return len(self.replay) if stored is None else int(stored)


def _identity(given: Any) -> Any:
    return given


def _concatenate(leaves: tuple[Array | None, ...]) -> Any:
    there = [leaf for leaf in leaves if leaf is not None]
    return np.concatenate(there) if there else None
