"""A replay buffer under test, in one form whatever its adapter has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from relive.conformance.outcome import Differs
from relive.conformance.peers.off_policy import Array, NotOffered, ReplayBatch, Transitions

T = TypeVar("T")

BATCH = 32
"""Rows of a batch, or fewer where fewer are stored: some libraries never draw more than they hold."""


def offered(capability: T | None, what: str) -> T:
    """The capability, or `NotOffered` that names it."""
    if capability is None:
        raise NotOffered(f"no {what}")
    return capability


class Probe:
    """Adds, draws and asks; an adapter without `prepare` and `read` is given `Transitions` and gives our names."""

    def __init__(self, replay: Any) -> None:
        self.replay = replay
        self._prepare: Callable[[Transitions], Any] = getattr(replay, "prepare", _as_it_is)
        self._read: Callable[[Any], Any] = getattr(replay, "read", _as_it_is)
        self.native: Any = None
        """The newest batch as the library gave it."""

    def verb(self, name: str) -> Callable[..., Any]:
        """A method that not every adapter has."""
        return offered(getattr(self.replay, name, None), f"`{name}`")

    def promise(self, name: str) -> Any:
        """A class attribute of the adapter, None where it has none."""
        return getattr(self.replay, name, None)

    def add(self, step: Transitions) -> None:
        """One step of all environments."""
        self.replay.add(self._prepare(step))

    def add_all(self, steps: Iterable[Transitions]) -> Probe:
        """Several, one after the other."""
        for step in steps:
            self.add(step)
        return self

    def add_raw(self, step: Transitions) -> None:
        """One step, with nothing done to its shapes."""
        self.replay.add(getattr(self.replay, "raw", self._prepare)(step))

    def sample(self, batch_size: int) -> ReplayBatch:
        """One batch under our names, as arrays."""
        self.native = self.replay.sample(batch_size)
        read = self._read(self.native)
        named = read if isinstance(read, Mapping) else read._asdict()
        known = {name: named[name] for name in ReplayBatch._fields if named.get(name) is not None}
        return ReplayBatch(**{name: np.asarray(array) for name, array in known.items()})

    def draw(self, count: int) -> ReplayBatch:
        """At least so many rows, from as many batches as it takes."""
        size = min(BATCH, self.stored)
        batches = [self.sample(size) for _ in range(-(-count // size))]
        for batch in batches:
            if len(batch.obs) != size:
                raise Differs(f"a batch of {size} rows", f"{len(batch.obs)} rows")
        return ReplayBatch(*(_joined(leaves) for leaves in zip(*batches, strict=True)))

    @property
    def stored(self) -> int:
        """How many transitions can be drawn."""
        stored = getattr(self.replay, "stored", None)
        return len(self.replay) if stored is None else int(stored)


def _as_it_is(given: Any) -> Any:
    return given


def _joined(leaves: tuple[Array | None, ...]) -> Any:
    there = [leaf for leaf in leaves if leaf is not None]
    return np.concatenate(there) if there else None
