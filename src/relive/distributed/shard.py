"""A shard of a service: a process with a replay buffer, which saves the buffer and the positions of its clients."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from relive.checkpoint.loading import load_folder
from relive.checkpoint.saving import save
from relive.checkpoint.snapshot import MAX_NOTE_BYTES
from relive.distributed.protocol import (
    ROWS_PER_LIFE,
    MemoryLocation,
    Push,
    PushAck,
    ServicePlan,
    ShardDraw,
    ShardIds,
    ShardTotals,
    as_shared_array,
    concatenate_arrays,
    describe_difference,
    unpack_block,
)
from relive.errors import CheckpointError, IncompatibleCheckpoint, NoCheckpoint, SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.replay.ids import flatten_ids, write_mutable_leaves
from relive.replay.samplers import Prioritized
from relive.replay.views import View
from relive.storage.allocator import supports_persistent_memory
from relive.storage.codec import JsonNode, SnapshotReader


class ShardReader:
    """Samples from a shard's buffer, and updates priorities and mutable fields."""

    def __init__(self, plan: ServicePlan, buffer: ReplayBuffer, ids: ShardIds) -> None:
        self._plan, self._replay, self._ids = plan, buffer, ids

    @property
    def _buffer(self) -> ReplayBuffer:
        return self._replay

    @property
    def lock(self) -> Any:
        """Lock of the buffer, for all processes that share the buffer's memory."""
        return self._buffer._lock

    @property
    def _heads(self) -> np.ndarray:
        """Number of the next row of each environment [envs]."""
        return self._buffer.storage.ring.head.numpy()

    @property
    def _prioritized(self) -> Any:
        return self._buffer.sampler if isinstance(self._plan.sampler, Prioritized) else None

    def totals(self) -> ShardTotals:
        buffer, priorities = self._buffer, self._prioritized
        rows = len(buffer)
        if priorities is None:
            return ShardTotals(rows, (float(rows), 0), 1.0, 0)
        return ShardTotals(rows, priorities.total_mass(), priorities.smallest_mass(), priorities.num_drawn)

    def draw(self, counts: list[int], view: View | None) -> list[ShardDraw | None]:
        """Draw this shard's rows of several batches. Weights are left out, because they depend on all shards."""
        return [self._draw_rows(count, view) if count else None for count in counts]

    def _draw_rows(self, num_rows: int, view: View | None) -> ShardDraw:
        buffer, priorities = self._buffer, self._prioritized
        with self.lock:
            totals = self.totals()
            batch: Any = buffer.sample(num_rows, view)
            index = batch["index"]
            masses = None if priorities is None else priorities.masses(buffer.storage.locate(index)).numpy()
        batch = batch.exclude("weight", "index")
        keys = batch.keys(include_nested=True, leaves_only=True)
        leaves = {key if isinstance(key, tuple) else (key,): batch.get(key) for key in keys}
        if ("step_index",) in leaves:
            step_ids = leaves["step_index",].numpy().copy()
            step_ids[step_ids >= 0] = self._ids.to_service_ids(step_ids[step_ids >= 0])
            leaves["step_index",] = torch.from_numpy(step_ids)
        leaves["index",] = torch.from_numpy(self._ids.to_service_ids(index.numpy()))
        return ShardDraw(totals, leaves, masses)

    def update(self, index: np.ndarray, priority: np.ndarray) -> tuple[int, float]:
        """Update priorities; return the number of overwritten rows and the largest priority accepted so far."""
        with self.lock:
            buffer_ids, is_valid = self._ids.to_shard_ids(index, self._heads)
            stale = self._buffer.update_priority(buffer_ids[is_valid], priority[is_valid])
            return stale + int((~is_valid).sum()), self._prioritized.merge_max_priority()

    def write(self, index: np.ndarray, leaves: dict[int, np.ndarray]) -> int:
        """Write mutable leaves of rows; return the number of rows that were overwritten or lost in a restart."""
        with self.lock:
            buffer_ids, is_valid = self._ids.to_shard_ids(index, self._heads)
            values = {i: concatenate_arrays([array[is_valid]]) for i, array in leaves.items()}
            flat = flatten_ids(buffer_ids[is_valid], self._buffer.device)
            return write_mutable_leaves(self._buffer.storage, *flat, values) + int((~is_valid).sum())

    def raise_largest_priority(self, priority: float) -> None:
        """Set the priority of new rows to `priority`, which another shard has accepted, if that is larger."""
        with self.lock:
            self._prioritized.merge_max_priority(priority)


MAX_CLIENTS = 4096
"""Maximum number of clients whose positions a shard stores; the least recently active clients are dropped."""


class Shard(ShardReader):
    """Stores the rows of the environments `plan.envs(number)`, and continues from its newest checkpoint.

    Every push of a client contains its position in the stream of the client's rows. The shard skips blocks that it has
    stored and blocks that would leave a gap, so that a push may be repeated. The position of each client is saved in
    the same checkpoint as the rows.
    """

    def __init__(self, plan: ServicePlan, number: int) -> None:
        self._plan, self._number = plan, number
        self._positions: dict[str, int] = {}
        """Number of stored rows of each client, the least recently active first."""
        self._saved_positions: dict[str, int] = {}
        self._counts = dict.fromkeys(("pushed", "duplicate", "sampled", "lost"), 0)
        self._failure: Exception | None = None
        """Exception of the start, which every call raises, because Ray would hide an exception of the constructor."""
        self._save_error: str | None = None
        """Reason why the last automatic save failed."""
        self._informed_clients: set[str] = set()
        """Clients that have received the current `_save_error`."""
        self._save_time, self._num_unsaved, self._checkpoint = time.monotonic(), 0, 0
        try:
            self._start_or_restore()
        except Exception as error:
            self._failure = error

    def _start_or_restore(self) -> None:
        plan, envs = self._plan, self._plan.envs_of_shard(self._number)
        first = np.zeros((1, len(envs)), np.int64)
        self._ids = ShardIds(envs, plan.num_envs, first, 0)
        self._replay: ReplayBuffer = plan.make_buffer(self._number)
        if plan.checkpoint is None:
            return
        with suppress(NoCheckpoint):
            path = plan.checkpoint.shard_folder(self._number)
            options = {"device": plan.shard_memory, "sampler": plan.shard_sampler}
            load_folder(path, ReplayBuffer, None, options, check_buffer=self._restore_shard)
        # Each restart of a shard has a number, which is part of its ids. The number is saved before any such id is
        # issued, so that no later restart has the same number.
        self.save()

    def _restore_shard(self, buffer: Any, snapshot: SnapshotReader) -> None:
        """Continue from a checkpoint; raise unless this shard wrote the note in the checkpoint."""
        assert self._plan.checkpoint is not None
        path = self._plan.checkpoint.shard_folder(self._number)
        if "note" not in snapshot.values.value:
            remedy = "Load it with relive.load, or pass another folder."
            raise IncompatibleCheckpoint(explain(str(path), "a shard of a service", "a single buffer", remedy))
        note = snapshot.values.entry("note")
        plan = note.entry("plan")
        if not isinstance(plan.value, dict):
            raise plan.error("the description of a service")
        differences = describe_difference(self._describe_settings(), plan.value)
        if differences:
            remedy = "Start the service with the saved settings, or pass another folder."
            expected = "the saved settings (service against folder)"
            raise IncompatibleCheckpoint(explain(str(path), expected, differences, remedy))
        self._require_described_buffer(buffer, plan)
        clients = [client.text() for client in note.entry("clients").items(MAX_CLIENTS)]
        positions = snapshot.read_array("note.positions", (len(clients),), torch.int64)
        if len(set(clients)) != len(clients) or bool(((positions < 0) | (positions >= 1 << 62)).any()):
            expected = "a number of rows for each client, and each client once"
            raise snapshot.array_node("note.positions", positions.tolist()).error(expected)
        rows = buffer.rows()
        saved_ids = self._read_saved_ids(note, snapshot, rows.stop)
        self._positions = dict(zip(clients, positions.tolist(), strict=True))
        self._replay = buffer
        self._ids = saved_ids.begin_life(rows.stop.numpy(), rows.first.numpy())

    def _require_described_buffer(self, buffer: Any, plan: JsonNode) -> None:
        """Raise unless the checkpoint's buffer is the one that its note describes."""
        own_config = self._replay.config()
        saved_config = buffer.config() if isinstance(buffer, ReplayBuffer) else {}
        ignored_keys = ("device", "sampler", "listeners")
        differences = [
            name for name in own_config if name not in ignored_keys and saved_config.get(name) != own_config[name]
        ]
        if differences:
            raise plan.error(f"the buffer of this shard beside it, with {differences[0]} {own_config[differences[0]]}")

    def _read_saved_ids(self, note: JsonNode, snapshot: SnapshotReader, head: torch.Tensor) -> ShardIds:
        envs, num_envs = self._plan.envs_of_shard(self._number), self._plan.num_envs
        starts = snapshot.read_array("note.starts", (range(1, MAX_NOTE_BYTES), len(envs)), torch.int64)
        # A larger life is refused, because ids must stay below 2^63 even if the shard restarts twice more.
        life = note.entry("life").integer(len(starts) - 1, (1 << 63) // (ROWS_PER_LIFE * num_envs) - 3)
        if bool((starts < 0).any() | (starts.diff(dim=0) < 0).any() | (starts[-1] > head).any()):
            expected = "the first rows of lives, in order, up to the newest row"
            raise snapshot.array_node("note.starts", starts.tolist()).error(expected)
        return ShardIds(envs, num_envs, starts.numpy(), life)

    def _describe_settings(self) -> dict[str, Any]:
        return {**self._plan.describe_settings(), "shard": self._number}

    @property
    def _buffer(self) -> ReplayBuffer:
        if self._failure is not None:
            raise self._failure
        return self._replay

    def describe_plan(self) -> dict[str, Any]:
        """Return the plan as plain data, which a client with another version of relive can read too."""
        _ = self._buffer
        return self._plan.describe_settings()

    def plan(self) -> ServicePlan:
        return self._plan

    def push(self, client: str, pushes: list[Push]) -> PushAck:
        """Store blocks of a client, in order. A refused block counts as sent; later blocks are stored."""
        first_error: Exception | None = None
        warnings: list[str] = []
        for push in pushes:
            position = self._positions.get(client, 0)
            if push.end_position <= position:
                self._counts["duplicate"] += push.num_rows
            elif push.position == position:
                self._record_position(client, push.end_position)
                try:
                    warnings += self._write_push(push)
                except Exception as error:
                    first_error = first_error or error
        self._save_if_due()
        save_error = None if client in self._informed_clients else self._save_error
        if save_error is not None:
            self._informed_clients.add(client)
        return self._make_ack(client)._replace(write_error=first_error, warnings=tuple(warnings), save_error=save_error)

    def _write_push(self, push: Push) -> list[str]:
        """Store a block; return warnings about the data, which the client issues."""
        buffer = self._buffer
        steps = push.num_rows // len(push.envs)
        rows = int(self._heads.max()) + 4 * steps
        if rows >= ROWS_PER_LIFE:
            expected = f"fewer than {ROWS_PER_LIFE} rows per environment"
            raise OverflowError(explain("extend", expected, rows, "Start a new service."))
        with buffer._lock:
            if len(push.cut_envs):
                buffer.cut(push.cut_envs)
            envs = torch.as_tensor(np.array(push.envs), device="cpu")
            buffer._write(*unpack_block(self._plan.schema, push.block), envs, steps)
            message, buffer.storage.warning = buffer.storage.warning, None
        self._counts["pushed"] += push.num_rows
        self._num_unsaved += push.num_rows
        return [] if message is None else [message]

    def resume(self, client: str, position: int, envs: np.ndarray) -> PushAck:
        """Continue the stream of a client at `position`: rows before it that are missing are lost, episodes are cut."""
        num_lost = position - self._positions.get(client, 0)
        if num_lost <= 0:
            return self._make_ack(client)
        self._buffer.cut(envs)
        self._counts["lost"] += num_lost
        self._record_position(client, position)
        return self._make_ack(client)._replace(num_lost=num_lost)

    def _record_position(self, client: str, position: int) -> None:
        self._positions.pop(client, None)
        self._positions[client] = position
        if len(self._positions) > MAX_CLIENTS:
            del self._positions[next(iter(self._positions))]

    def _make_ack(self, client: str) -> PushAck:
        position = self._positions.get(client, 0)
        return PushAck(position, position if self._plan.checkpoint is None else self._saved_positions.get(client, 0))

    def clear(self) -> None:
        """Remove every row, and save the empty shard."""
        self._buffer.clear()
        if self._plan.checkpoint is not None:
            self.save()

    def memory_location(self) -> MemoryLocation | None:
        """Return where other processes of this machine find the memory; None if the memory is not shared."""
        return MemoryLocation(os.getpid(), self._buffer.handle(), self._ids) if supports_persistent_memory() else None

    def draw(self, counts: list[int], view: View | None) -> list[ShardDraw | None]:
        """Return `ShardReader.draw` with leaves as arrays, which Ray sends without a copy."""
        self._counts["sampled"] += sum(counts)
        return [
            draw and draw._replace(leaves={path: as_shared_array(leaf) for path, leaf in draw.leaves.items()})
            for draw in super().draw(counts, view)
        ]

    def save(self) -> int:
        """Write a checkpoint of the rows, the priorities and each client's position; return its number."""
        checkpoint = self._plan.checkpoint
        if checkpoint is None:
            remedy = "Start the service with checkpoint=."
            raise SchemaError(explain("save", "a service with a checkpoint", None, remedy))
        note = {"plan": self._describe_settings(), "life": self._ids.life, "clients": list(self._positions)}
        positions = torch.tensor(list(self._positions.values()), dtype=torch.int64, device="cpu")
        arrays = {"positions": positions, "starts": torch.from_numpy(self._ids.starts)}
        path = checkpoint.shard_folder(self._number)
        self._checkpoint = save(self._buffer, path, keep=checkpoint.keep, note=(note, arrays))
        self._saved_positions = dict(self._positions)
        self._save_time, self._num_unsaved, self._save_error = time.monotonic(), 0, None
        self._informed_clients.clear()
        return self._checkpoint

    def _save_if_due(self) -> None:
        checkpoint = self._plan.checkpoint
        if checkpoint is None:
            return
        has_enough_rows = checkpoint.rows is not None and self._num_unsaved >= checkpoint.rows
        if has_enough_rows or time.monotonic() - self._save_time >= checkpoint.seconds:
            try:
                self.save()
            except CheckpointError as error:
                # `push` reports a failed save without raising: no row is lost unless the shard restarts before the next
                # save.
                self._save_error = str(error)
                self._save_time, self._num_unsaved = time.monotonic(), 0

    def stats(self) -> dict[str, Any]:
        return {
            "rows": len(self._buffer),
            "nbytes": self._buffer.nbytes,
            **self._counts,
            "clients": len(self._positions),
            "restarts": self._ids.life,
            "checkpoint": self._checkpoint,
            "trouble": self._save_error,
            "pid": os.getpid(),
        }
