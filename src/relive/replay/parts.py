"""What a replay buffer consists of, to whoever saves, loads or verifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relive.checkpoint.snapshot import SnapshotReader, State
from relive.replay.given_steps import GivenSteps
from relive.replay.samplers import Sampler
from relive.replay.samplers.registry import resume
from relive.replay.store import ReplayStore
from relive.rng import Randomness
from relive.statistics.observers import Observers


@dataclass(frozen=True)
class ReplayParts:
    """The parts of a buffer, each with a state of its own. The caller holds the lock."""

    storage: ReplayStore
    sampler: Sampler
    random: Randomness
    observers: Observers
    given: GivenSteps

    @property
    def beside_rows(self) -> dict[str, Any]:
        """The parts beside the rows and the sampler, by their names in files."""
        return {"random": self.random, "listeners": self.observers, "staged": self.given}

    def state(self) -> State:
        """Everything that changes, but for the rows; the tensors share memory."""
        memory = self.storage.memory
        beside = {name: part.state() for name, part in self.beside_rows.items()}
        rest = State.of_parts(
            {"sampler": ({}, self.sampler.state()), **beside, "memory": ({"name": memory.allocator.name}, {})}
        )
        ring = memory.state()
        return State({**ring.values, **rest.values}, {**ring.arrays, **rest.arrays})

    def load_state(self, saved: SnapshotReader) -> None:
        """Become what was saved, but for the rows; a CorruptCheckpoint says what no such buffer can have been."""
        memory = self.storage.memory
        memory.load_state(saved)
        self.storage.found()
        resume(self.sampler, memory, saved.part("sampler"), saved.config)
        self.random.load_state(saved.part("random"))
        self.observers.load_state(saved.part_without_values("listeners"))
        self.given.load_state(saved.part("staged"))

    def check(self) -> None:
        """Verify every invariant but the bytes of rows."""
        self.storage.check()
        self.given.check()
        self.observers.check()
        self.random.check()
        if self.storage.memory.has_values:
            self.sampler.check()
