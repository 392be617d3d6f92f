"""One shard: a buffer in a process of its own, who has sent what to it, and when it was last saved."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from relive.checkpoint import save
from relive.checkpoint.loading import found
from relive.distributed.block import Block, unpack, wired
from relive.distributed.identity import ROWS, Identity
from relive.distributed.near import Whereabouts
from relive.distributed.plan import Plan, difference
from relive.distributed.reading import Draw, Reading
from relive.errors import CheckpointError, IncompatibleCheckpoint, NoCheckpoint, SchemaError, explain
from relive.memory.documents import Node
from relive.memory.saved import MOST_OF_NOTE, Saved
from relive.memory.shared import SharedRoom
from relive.replay.buffer import ReplayBuffer
from relive.replay.views import View

MOST_CLIENTS = 4096
"""So many clients are remembered; of more, those that have been silent the longest are forgotten."""


class Push(NamedTuple):
    """A block of a client."""

    position: int
    """How many rows the client has sent before."""
    envs: np.ndarray
    """Whose steps they are, numbered within the shard."""
    block: Block
    cut: np.ndarray
    """Those of them that begin a new episode."""

    @property
    def rows(self) -> int:
        return (len(self.block.leaves[0]) - 1) * len(self.envs)

    @property
    def end(self) -> int:
        return self.position + self.rows


class Ack(NamedTuple):
    """What a shard has of a client, in rows since the client began."""

    applied: int
    durable: int
    """A checkpoint has them too (where there is one to go on from)."""
    lost: int = 0
    """Rows that a restart has undone and that the client cannot send again."""
    refused: Exception | None = None
    """Why a block was not taken."""
    doubts: tuple[str, ...] = ()
    """What looks like a mistake in what was taken, each once."""


class Shard(Reading):
    """The environments `plan.envs(number)`. Everything goes on from the newest checkpoint, if there is one.

    A client's rows come as a stream: every push says how many the client has sent before. What is there already is
    passed over, and what does not follow is not taken; so a push may be repeated as often as needed. How far each
    stream has come is saved in the same checkpoint as the rows.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan, self._number = plan, number
        self._applied: dict[str, int] = {}
        self._durable: dict[str, int] = {}
        self._counts = dict.fromkeys(("pushed", "duplicate", "sampled", "lost"), 0)
        self._failure: Exception | None = None
        """Why there is no buffer. (A constructor that raises would take the reason with it.)"""
        self._trouble: str | None = None
        """Why the last save that nobody waited for has failed."""
        self._saved_at, self._unsaved, self._checkpoint = time.monotonic(), 0, 0
        try:
            self._start()
        except Exception as error:
            self._failure = error

    def _start(self) -> None:
        plan, envs = self._plan, self._plan.envs(self._number)
        first = np.zeros((1, len(envs)), np.int64)
        self._identity = Identity(envs, plan.num_envs, first, 0)
        self._made: ReplayBuffer = plan.buffer(self._number)
        if plan.checkpoint is None:
            return
        with suppress(NoCheckpoint):
            path = plan.checkpoint.of_shard(self._number)
            options = {"device": plan.memory, "capacity": None, "sampler": plan.shard_sampler}
            found(path, ReplayBuffer, None, options, accept=self._restore)
        # Whoever starts after this one must know that it has lived, and given ids.
        self.save()

    def _restore(self, buffer: Any, read: Saved) -> None:
        """Go on from a checkpoint, if its note is one of this very shard."""
        assert self._plan.checkpoint is not None
        path = self._plan.checkpoint.of_shard(self._number)
        if "note" not in read.values.value:
            remedy = "Load it with relive.load, or pass another folder."
            raise IncompatibleCheckpoint(explain(str(path), "a shard of a service", "a single buffer", remedy))
        note = read.values.entry("note")
        plan = note.entry("plan")
        if not isinstance(plan.value, dict):
            raise plan.wrong("the description of a service")
        differs = difference(self._described(), plan.value)
        if differs:
            remedy = "Start the service with the saved settings, or pass another folder."
            expected = "the saved settings (service against folder)"
            raise IncompatibleCheckpoint(explain(str(path), expected, differs, remedy))
        self._require_own(buffer, plan)
        clients = [client.text() for client in note.entry("clients").items(MOST_CLIENTS)]
        positions = read.shaped("note.positions", (len(clients),), torch.int64)
        if len(set(clients)) != len(clients) or bool(((positions < 0) | (positions >= 1 << 62)).any()):
            got = positions.tolist()
            raise read.at("note.positions", got).wrong("a number of rows for each client, and each client once")
        rows = buffer.rows()
        before = self._saved_identity(note, read, rows.stop)
        self._applied = dict(zip(clients, positions.tolist(), strict=True))
        self._made = buffer
        self._identity = before.reborn(rows.stop.numpy(), rows.first.numpy())

    def _require_own(self, buffer: Any, plan: Node) -> None:
        """The buffer beside the note is the one that the note speaks of."""
        own = self._made.config()
        found = buffer.config() if isinstance(buffer, ReplayBuffer) else {}
        free = ("device", "sampler", "listeners")
        differs = [name for name in own if name not in free and found.get(name) != own[name]]
        if differs:
            raise plan.wrong(f"the buffer of this shard beside it, with {differs[0]} {own[differs[0]]}")

    def _saved_identity(self, note: Node, read: Saved, head: torch.Tensor) -> Identity:
        envs, num_envs = self._plan.envs(self._number), self._plan.num_envs
        starts = read.shaped("note.starts", (range(1, MOST_OF_NOTE), len(envs)), torch.int64)
        # Rows are below `ROWS`, and two more lives must have ids.
        life = note.entry("life").integer(len(starts) - 1, (1 << 63) // (ROWS * num_envs) - 3)
        if bool((starts < 0).any() | (starts.diff(dim=0) < 0).any() | (starts[-1] > head).any()):
            raise read.at("note.starts", starts.tolist()).wrong(
                "the first rows of lives, in order, up to the newest row"
            )
        return Identity(envs, num_envs, starts.numpy(), life)

    def _described(self) -> dict[str, Any]:
        return {**self._plan.described(), "shard": self._number}

    @property
    def _buffer(self) -> ReplayBuffer:
        if self._failure is not None:
            raise self._failure
        return self._made

    @property
    def _head(self) -> np.ndarray:
        return self._buffer.storage.heads.numpy()

    # Who is there

    def hello(self) -> dict[str, Any]:
        """Plain data, for those who do not know yet whether they understand anything else."""
        _ = self._buffer
        return self._plan.described()

    def plan(self) -> Plan:
        """The whole description."""
        return self._plan

    # Writing

    def push(self, client: str, pushes: list[Push]) -> Ack:
        """Blocks of a client, in order. One that the buffer refuses counts as sent, and the others are taken."""
        refused: Exception | None = None
        doubts: list[str] = []
        for push in pushes:
            if push.end <= self._applied.get(client, 0):
                self._counts["duplicate"] += push.rows
            elif push.position == self._applied.get(client, 0):
                self._advance(client, push.end)
                try:
                    doubts += self._write(push)
                except Exception as error:
                    refused = refused or error
        self._save_if_due()
        return self._ack(client)._replace(refused=refused, doubts=tuple(doubts))

    def _write(self, push: Push) -> list[str]:
        """Take a block; returns what looks like a mistake, for the client to say."""
        buffer = self._buffer
        steps = push.rows // len(push.envs)
        if int(self._head.max()) + 4 * steps >= ROWS:
            expected, got = f"fewer than {ROWS} rows per environment", int(self._head.max()) + 4 * steps
            raise OverflowError(explain("extend", expected, got, "Start a new service."))
        with buffer._lock:
            if len(push.cut):
                buffer.cut(push.cut)
            step = *unpack(buffer._schema, push.block), torch.as_tensor(np.array(push.envs)), steps
            doubts = []
            while (doubt := buffer._write(*step)) is not None:
                doubts.append(doubt)
        self._counts["pushed"] += push.rows
        self._unsaved += push.rows
        return doubts

    def resume(self, client: str, position: int, envs: np.ndarray) -> Ack:
        """Go on with a client that has nothing before `position` any more; what is missing is lost to its episodes."""
        lost = position - self._applied.get(client, 0)
        if lost <= 0:
            return self._ack(client)
        self._buffer.cut(envs)
        self._counts["lost"] += lost
        self._advance(client, position)
        return self._ack(client)._replace(lost=lost)

    def _advance(self, client: str, position: int) -> None:
        self._applied.pop(client, None)
        self._applied[client] = position
        if len(self._applied) > MOST_CLIENTS:
            del self._applied[next(iter(self._applied))]

    def _ack(self, client: str) -> Ack:
        applied = self._applied.get(client, 0)
        return Ack(applied, applied if self._plan.checkpoint is None else self._durable.get(client, 0))

    def clear(self) -> None:
        """Forget every row, and do not remember them after a restart."""
        self._buffer.clear()
        if self._plan.checkpoint is not None:
            self.save()

    # Reading by others

    def whereabouts(self) -> Whereabouts | None:
        """Where other processes of this machine find the rows; None if they cannot."""
        shared = isinstance(self._buffer.storage.memory.room, SharedRoom)
        return Whereabouts(os.getpid(), self._buffer.handle(), self._identity) if shared else None

    def draw(self, counts: list[int], view: View | None) -> list[Draw | None]:
        """As arrays, which Ray hands over without a copy."""
        self._counts["sampled"] += sum(counts)
        return [draw and draw._replace(leaves=wired(draw.leaves)) for draw in super().draw(counts, view)]

    # Saving

    def save(self) -> int:
        """Write a checkpoint of the rows, their priorities, and how far each client has come; returns its number."""
        checkpoint = self._plan.checkpoint
        if checkpoint is None:
            raise SchemaError(
                explain("save", "a service with a checkpoint", None, "Start the service with checkpoint=.")
            )
        note = {"plan": self._described(), "life": self._identity.life, "clients": list(self._applied)}
        positions = torch.tensor(list(self._applied.values()), dtype=torch.int64)
        arrays = {"positions": positions, "starts": torch.from_numpy(self._identity.starts)}
        path = checkpoint.of_shard(self._number)
        self._checkpoint = save(self._buffer, path, keep=checkpoint.keep, note=(note, arrays))
        self._durable = dict(self._applied)
        self._saved_at, self._unsaved, self._trouble = time.monotonic(), 0, None
        return self._checkpoint

    def _save_if_due(self) -> None:
        checkpoint = self._plan.checkpoint
        if checkpoint is None:
            return
        enough = checkpoint.rows is not None and self._unsaved >= checkpoint.rows
        if enough or time.monotonic() - self._saved_at >= checkpoint.seconds:
            try:
                self.save()
            except CheckpointError as error:  # the rows are here, and the next save will try again
                self._trouble = str(error)
                self._saved_at, self._unsaved = time.monotonic(), 0

    def stats(self) -> dict[str, Any]:
        """How it is."""
        return {
            "rows": len(self._buffer),
            "nbytes": self._buffer.nbytes,
            **self._counts,
            "clients": len(self._applied),
            "restarts": self._identity.life,
            "checkpoint": self._checkpoint,
            "trouble": self._trouble,
            "pid": os.getpid(),
        }
