# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# If the library is missing, pyright resolves its name to this file.
"""flashbax: item, prioritised item and trajectory buffers, on the CPU.

Buffers are pure functions over a state, and each draw takes a key. The size of a batch is fixed when a buffer is
made, so the adapter makes one buffer per batch size, all over the same state. Transitions with their own next
observation are items. flashbax returns probabilities, from which the learner computes the importance weights; here they
are (N · p)^−β, divided by the largest weight of the batch.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import flashbax
import jax
import numpy as np

from relive_conformance.adapters.off_policy import ALPHA, BETA, ReplayBatch, ReplayShape, Transitions
from relive_conformance.adapters.protocol import Adapter, Array

_LEARNED = ("obs", "action", "reward", "terminated", "next_obs")


@cache
def _items(capacity: int, batch_size: int, prioritized: bool) -> Any:
    sizes = {"max_length": capacity, "min_length": 1, "sample_batch_size": batch_size, "add_batches": True}
    if prioritized:
        return _compiled(flashbax.make_prioritised_item_buffer(**sizes, priority_exponent=ALPHA))
    return _compiled(flashbax.make_item_buffer(**sizes))


@cache
def _runs(capacity: int, num_envs: int, batch_size: int, length: int) -> Any:
    return _compiled(
        flashbax.make_trajectory_buffer(
            max_length_time_axis=capacity // num_envs,
            min_length_time_axis=length,
            add_batch_size=num_envs,
            sample_batch_size=batch_size,
            sample_sequence_length=length,
            period=1,
        )
    )


def _compiled(buffer: Any) -> Any:
    # A donated state is changed in place; otherwise every step would copy the whole memory.
    donated = {"add": 0, "set_priorities": 0, "sample": (), "can_sample": ()}
    return buffer.replace(
        **{
            name: jax.jit(getattr(buffer, name), donate_argnums=positions)
            for name, positions in donated.items()
            if hasattr(buffer, name)
        }
    )


class FlashbaxReplay:
    """Adapter of `make_item_buffer`."""

    nbytes = None
    prioritized = False

    def __init__(self, shape: ReplayShape) -> None:
        self._shape, self._state = shape, None
        self._key = jax.random.PRNGKey(int(np.random.default_rng(shape.seed).integers(2**31)))
        self._added = 0

    def _buffer(self, batch_size: int = 1) -> Any:
        return _items(self._shape.capacity, batch_size, self.prioritized)

    def prepare(self, step: Transitions) -> Any:
        return {name: getattr(step, name).copy() for name in _LEARNED}

    def raw(self, step: Transitions) -> Any:
        return {name: np.array(getattr(step, name)) for name in _LEARNED}

    def add(self, prepared: Any) -> None:
        if self._state is None:
            self._state = self._buffer().init(jax.tree.map(lambda leaf: leaf[0], prepared))
        self._state = self._buffer().add(self._state, prepared)
        self._added += len(prepared["reward"])

    at_once = 1000
    """Number of rows that `fill` adds per call; each number is compiled once."""

    def fill(self, block: Transitions) -> None:
        whole = len(block) - len(block) % self.at_once
        for row in range(0, whole, self.at_once):
            self.add(self.prepare(block[row : row + self.at_once]))
        for row in range(whole, len(block)):
            self.add(self.prepare(block[row : row + 1]))

    def sample(self, batch_size: int) -> Any:
        buffer = self._buffer(batch_size)
        if self._state is None or not buffer.can_sample(self._state):
            raise ValueError("can_sample says no")
        self._key, key = jax.random.split(self._key)
        return buffer.sample(self._state, key)

    def read(self, batch: Any) -> ReplayBatch:
        return ReplayBatch(**{name: np.asarray(batch.experience[name]) for name in _LEARNED})

    @property
    def stored(self) -> int:
        return min(self._added, self._shape.capacity)


class FlashbaxPrioritized(FlashbaxReplay):
    """Adapter of `make_prioritised_item_buffer`."""

    prioritized = True

    def read(self, batch: Any) -> ReplayBatch:
        weight = (self.stored * np.asarray(batch.probabilities)) ** -BETA
        return super().read(batch)._replace(weight=weight / weight.max())

    def priority(self, values: Array) -> Array:
        return values

    def update(self, batch: Any, priority: Array) -> None:
        self.set_priority(batch.indices, priority)

    def handles(self, batch: Any) -> Array:
        return np.asarray(batch.indices)

    def set_priority(self, handles: Array, priority: Array) -> None:
        self._state = self._buffer().set_priorities(self._state, handles, priority.astype(np.float32))


class FlashbaxSequence(FlashbaxReplay):
    """Adapter of `make_trajectory_buffer`: sequences of consecutive steps of one environment."""

    at_once = 1
    crosses_episodes = "sequences are documented as runs along the time axis; ends of episodes are not its subject"

    def __init__(self, shape: ReplayShape, length: int) -> None:
        super().__init__(shape)
        self._length = length

    def _buffer(self, batch_size: int = 1) -> Any:
        return _runs(self._shape.capacity, self._shape.num_envs, batch_size, self._length)

    def add(self, prepared: Any) -> None:
        if self._state is None:
            self._state = self._buffer().init(jax.tree.map(lambda leaf: leaf[0], prepared))
        self._state = self._buffer().add(self._state, jax.tree.map(lambda leaf: leaf[:, None], prepared))
        self._added += len(prepared["reward"])


def adapter() -> Adapter:
    """Return the adapter of flashbax."""
    return Adapter(
        "flashbax",
        version("flashbax"),
        replay=FlashbaxReplay,
        prioritized=FlashbaxPrioritized,
        sequence=FlashbaxSequence,
    )
