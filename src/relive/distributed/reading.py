"""Drawing from one shard: in its own process, or in any other of its machine that has its memory open."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from relive.distributed.identity import Identity
from relive.distributed.plan import Plan
from relive.fields.schema import Path
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Prioritized
from relive.replay.views import View


class Standing(NamedTuple):
    """A shard's part of the whole memory."""

    rows: int
    mass: tuple[float, int]
    """m · 2^e: what a shard is drawn in proportion to."""
    smallest: float
    drawn: int


class Draw(NamedTuple):
    """Rows of a batch."""

    standing: Standing
    """Before they were drawn."""
    leaves: dict[Path, Any]
    """Tensors; arrays where they come from another process."""
    masses: np.ndarray | None
    """What each row was drawn in proportion to, float64 [B]; None if all are alike."""


class Reading:
    """What a service asks of a shard's buffer, but for adding to it."""

    def __init__(self, plan: Plan, buffer: ReplayBuffer, identity: Identity) -> None:
        self._plan, self._made, self._identity = plan, buffer, identity

    @property
    def _buffer(self) -> ReplayBuffer:
        return self._made

    @property
    def lock(self) -> Any:
        """Of the buffer, against everybody who has its memory."""
        return self._buffer._lock

    @property
    def _priorities(self) -> Any:
        return self._buffer.run if isinstance(self._plan.sampler, Prioritized) else None

    def standing(self) -> Standing:
        """What part of the memory is here."""
        buffer, priorities = self._buffer, self._priorities
        rows = len(buffer)
        if priorities is None:
            return Standing(rows, (float(rows), 0), 1.0, 0)
        return Standing(rows, priorities.total(), priorities.smallest(), priorities.drawn)

    def draw(self, counts: list[int], view: View | None) -> list[Draw | None]:
        """Rows of several batches, as this shard's buffer draws them; weights are left to those who see all shards."""
        return [self._draw(count, view) if count else None for count in counts]

    def _draw(self, count: int, view: View | None) -> Draw:
        buffer, priorities = self._buffer, self._priorities
        with self.lock:
            standing = self.standing()
            batch: Any = buffer.sample(count, view)
            index = batch["index"]
            masses = None if priorities is None else priorities.masses(buffer.storage.locate(index)).numpy()
        batch = batch.exclude("weight", "index")
        leaves = {_path(key): batch.get(key) for key in batch.keys(include_nested=True, leaves_only=True)}
        leaves["index",] = torch.from_numpy(self._identity.outside(index.numpy()))
        return Draw(standing, leaves, masses)

    def update(self, index: np.ndarray, priority: np.ndarray) -> tuple[int, float]:
        """New priorities; returns how many rows were gone, and the largest priority accepted so far."""
        with self.lock:
            head = self._buffer.storage.heads.numpy()
            inside, kept = self._identity.inside(index, head)
            stale = self._buffer.update_priority(inside[kept], priority[kept])
            return stale + int((~kept).sum()), self._priorities.largest()

    def expect(self, priority: float) -> None:
        """Another shard has accepted this priority: new rows get it here too."""
        with self.lock:
            self._priorities.largest(priority)


def _path(key: Any) -> Path:
    return key if isinstance(key, tuple) else (key,)
