"""Reading one shard, in its own process or in another process of the same machine that shares its memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from relive.distributed.block import to_tensor
from relive.distributed.plan import Plan
from relive.distributed.shard_ids import ShardIds
from relive.fields.schema import Path
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Prioritized
from relive.replay.views import View
from relive.replay.write_back import flat_ids, write_back


class ShardTotals(NamedTuple):
    """The figures of a shard that sampling from all shards needs."""

    rows: int
    """The number of stored transitions."""
    mass: tuple[float, int]
    """(m, e): the shard's rows are drawn in proportion to m · 2^e, the sum of its priorities."""
    smallest: float
    """The smallest priority."""
    drawn: int
    """The number of rows drawn so far."""


class Draw(NamedTuple):
    """The rows of a batch that come from one shard."""

    totals: ShardTotals
    """The shard's figures before the draw."""
    leaves: dict[Path, Any]
    """Tensors [B, …]; arrays if they come from another process."""
    masses: np.ndarray | None
    """The priority of each row, float64 [B]; None for uniform draws."""


class ShardReader:
    """Reads a shard's buffer and updates its priorities."""

    def __init__(self, plan: Plan, buffer: ReplayBuffer, ids: ShardIds) -> None:
        self._plan, self._made, self._ids = plan, buffer, ids

    @property
    def _buffer(self) -> ReplayBuffer:
        return self._made

    @property
    def lock(self) -> Any:
        """The lock of the buffer, which all processes that share its memory take."""
        return self._buffer._lock

    @property
    def _priorities(self) -> Any:
        return self._buffer.sampler if isinstance(self._plan.sampler, Prioritized) else None

    def totals(self) -> ShardTotals:
        """The shard's current figures."""
        buffer, priorities = self._buffer, self._priorities
        rows = len(buffer)
        if priorities is None:
            return ShardTotals(rows, (float(rows), 0), 1.0, 0)
        return ShardTotals(rows, priorities.total(), priorities.smallest(), priorities.drawn)

    def draw(self, counts: list[int], view: View | None) -> list[Draw | None]:
        """Rows of several batches, without weights, which depend on all shards."""
        return [self._draw(count, view) if count else None for count in counts]

    def _draw(self, count: int, view: View | None) -> Draw:
        buffer, priorities = self._buffer, self._priorities
        with self.lock:
            totals = self.totals()
            batch: Any = buffer.sample(count, view)
            index = batch["index"]
            masses = None if priorities is None else priorities.masses(buffer.storage.locate(index)).numpy()
        batch = batch.exclude("weight", "index")
        leaves = {_path(key): batch.get(key) for key in batch.keys(include_nested=True, leaves_only=True)}
        if ("step_index",) in leaves:
            leaves["step_index",] = self._named_steps(leaves["step_index",].numpy())
        leaves["index",] = torch.from_numpy(self._ids.to_service(index.numpy()))
        return Draw(totals, leaves, masses)

    def update(self, index: np.ndarray, priority: np.ndarray) -> tuple[int, float]:
        """Update priorities; returns how many rows were overwritten, and the largest priority accepted so far."""
        with self.lock:
            head = self._buffer.storage.heads.numpy()
            own_ids, kept = self._ids.to_shard(index, head)
            stale = self._buffer.update_priority(own_ids[kept], priority[kept])
            return stale + int((~kept).sum()), self._priorities.largest()

    def _named_steps(self, ids: np.ndarray) -> torch.Tensor:
        named, is_step = ids.copy(), ids >= 0
        named[is_step] = self._ids.to_service(ids[is_step])
        return torch.from_numpy(named)

    def write(self, index: np.ndarray, leaves: dict[int, np.ndarray]) -> int:
        """Write mutable leaves of rows; returns how many rows were overwritten, or lost with a process."""
        with self.lock:
            buffer = self._buffer
            own_ids, kept = self._ids.to_shard(index, buffer.storage.heads.numpy())
            values = {i: to_tensor([array[kept]]) for i, array in leaves.items()}
            named = flat_ids(own_ids[kept], buffer.device)
            return write_back(buffer.storage, *named, values) + int((~kept).sum())

    def raise_largest_priority(self, priority: float) -> None:
        """Give new rows at least this priority, which another shard has accepted."""
        with self.lock:
            self._priorities.largest(priority)


def _path(key: Any) -> Path:
    return key if isinstance(key, tuple) else (key,)
