"""What a replay buffer consists of, to whoever saves, loads or verifies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from relive.errors import InvariantError, SchemaError, explain
from relive.fields.conversion import alias
from relive.memory.saved import Saved, State
from relive.randomness import Randomness, verify_state
from relive.replay.given_steps import GivenSteps, Staged
from relive.replay.row_memory import RowMemory
from relive.replay.samplers.protocol import Draws, Sampler, verify_draws
from relive.replay.samplers.registry import resume
from relive.replay.store import ReplayStore
from relive.replay.torch_store import TorchStore
from relive.statistics.observers import Observers


class Verified(NamedTuple):
    """What a state dict holds, where that is not simply copied."""

    memory: RowMemory
    staged: Staged


@dataclass(frozen=True)
class ReplayParts:
    """The parts of a buffer, each with a state of its own. The caller holds the lock."""

    storage: ReplayStore
    sampler: Sampler
    run: Draws
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
        rest = State.of_parts({"sampler": ({}, self.run.saved()), **beside, "memory": ({"name": memory.room.name}, {})})
        ring = memory.state()
        return State({**ring.values, **rest.values}, {**ring.arrays, **rest.arrays})

    def load_state(self, saved: Saved) -> None:
        """Become what was saved, but for the rows; a CorruptCheckpoint says what no such buffer can have been."""
        memory = self.storage.memory
        moved = memory.load_state(saved, saved.config.entry("capacity").integer(1) // memory.ring.num_envs)
        self.storage.found()
        resume(self.run, self.sampler, memory, saved.part("sampler"), moved)
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
            self.run.check()

    # As a dict of tensors that share memory

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, with the rows."""
        return {
            "sampler": type(self.sampler).__name__,
            "storage": {name: alias(tensor) for name, tensor in self.storage.memory.tensors_by_name().items()},
            "draws": {name: alias(tensor) for name, tensor in self.run.saved().items()},
            "random": self.random.snapshot(),
            "staged": dict(self.given.staged),
            "listeners": self.observers.snapshot(),
        }

    def verified(self, state: Any) -> Verified:
        """Raise a SchemaError if any part of a state dict cannot be that of a buffer made alike."""
        names = ("sampler", "storage", "draws", "random", "staged", "listeners")
        given = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        if given != sorted(names):
            remedy = "Pass what state_dict() of a buffer gave."
            raise SchemaError(explain("load_state_dict", f"the parts {sorted(names)}", given, remedy))
        own = type(self.sampler).__name__
        if not isinstance(state["sampler"], str) or state["sampler"] != own:
            remedy = "Make the buffer with the sampler of the saved buffer."
            raise SchemaError(explain("load_state_dict", f"the state of {own}", state["sampler"], remedy))
        try:
            trial = TorchStore(self.storage.memory.over(state["storage"]))
            trial.found()
            trial.check()
            verify_draws(self.sampler, trial, state["draws"])
            verify_state(state["random"])
            self.observers.verify(state["listeners"])
            return Verified(trial.memory, self.given.verified(state["staged"]))
        except InvariantError as error:
            raise SchemaError(f"load_state_dict: {error}") from error

    def replace(self, state: Mapping[str, Any], verified: Verified) -> None:
        """Become a buffer whose state dict was verified."""
        self.storage.memory.copy_from(verified.memory)
        self.storage.found()
        self.run.resume(state["draws"])
        self.random.restore(state["random"])
        self.given.staged = verified.staged
        self.observers.restore(state["listeners"])
