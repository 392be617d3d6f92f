"""The rows of one client on their way to one shard: in order, each once, and in bounded memory."""

from __future__ import annotations

import time
import warnings
from collections import deque
from typing import Any

import numpy as np

from relive.distributed.block import Block
from relive.distributed.calls import Calls, Interrupted
from relive.distributed.shard import Ack, Push
from relive.errors import warn_user

KEPT_BYTES = 64 << 20
"""The most bytes of blocks kept to be sent again after a restart: the shard has them, but no checkpoint yet."""


class Stream:
    """Pushes blocks without waiting while fewer than `max_pending` are unconfirmed, then waits for the shard.

    One call is under way at a time, and blocks that come meanwhile go together in the next call: the busier a shard is,
    the fewer calls it gets for the same rows. A block is kept until a checkpoint contains it, or until newer blocks
    need the memory. After a restart of the shard, kept blocks that it lacks are sent again; the rest are lost.
    """

    patience = 2e-3
    """Seconds after a call during which the stream does not ask for the answer: asking costs time, and waiting blocks
    are sent together."""

    def __init__(self, calls: Calls, shard: int, client: str, max_pending: int) -> None:
        self._calls, self._shard, self._client, self._max_pending = calls, shard, client, max_pending
        self._position = 0
        """The number of rows pushed."""
        self._kept: deque[Push] = deque()
        """Blocks that the shard has confirmed, but that no checkpoint contains."""
        self._sent: list[Push] = []
        """Blocks of the call under way."""
        self._waiting: list[Push] = []
        """Blocks for the next call."""
        self._answer: Any = None
        """Ray's reference to the answer of the call under way."""
        self._asked = 0.0
        """When the answer was last asked for."""
        self._envs: set[int] = set()
        self.lost = 0
        """The number of rows that restarts have lost."""

    @property
    def pending(self) -> int:
        """The number of blocks that the shard has not confirmed."""
        return len(self._sent) + len(self._waiting)

    def make_room(self, deadline: float) -> None:
        """Wait until another block may be pushed. An error leaves the stream unchanged, so that a caller can retry."""
        if self._is_answered():
            self._settle(deadline)
        while self.pending >= self._max_pending:
            self._settle(deadline)

    def send_waiting(self, deadline: float) -> None:
        """Send the waiting blocks if the last call was answered; without further pushes nothing else would."""
        if self._waiting and self._is_answered():
            self._settle(deadline)

    def _is_answered(self) -> bool:
        now = time.monotonic()
        if not self._sent or now - self._asked <= self.patience:
            return False
        self._asked = now
        return self._calls.is_answered(self._answer)

    def push(self, envs: np.ndarray, block: Block, cut: np.ndarray) -> None:
        """Take a block, after `make_room`."""
        push = Push(self._position, envs, block, cut)
        self._position = push.end
        self._envs.update(envs.tolist())
        self._waiting.append(push)
        self._send()

    def flush(self, deadline: float) -> None:
        """Wait until the shard has every pushed block, also if it has restarted since it confirmed one."""
        self._settle_all(deadline)
        if self._kept:
            self._resume(deadline)
            self._settle_all(deadline)

    def _settle_all(self, deadline: float) -> None:
        while self.pending:
            self._settle(deadline)

    def _send(self) -> None:
        if self._waiting and not self._sent:
            self._answer = self._calls.start(self._shard, "push", self._client, self._waiting)
            self._asked = time.monotonic()
            self._sent, self._waiting = self._waiting, []

    def _settle(self, deadline: float) -> None:
        """Wait for the answer to the call under way, and act on it."""
        try:
            ack: Ack = self._calls.fetch(self._shard, self._answer, deadline)
        except Interrupted:
            return self._resume(deadline)
        if ack.applied < self._sent[-1].end:  # the shard has restarted without earlier blocks
            return self._resume(deadline)
        self._kept.extend(self._sent)
        self._sent = []
        self._forget(ack)
        self._send()
        for message in ack.warnings:
            warn_user(message)
        if ack.trouble is not None:
            warnings.warn(
                f"shard {self._shard}: cannot write checkpoints, so that a restart loses newer rows. {ack.trouble}",
                stacklevel=2,
            )
        if ack.refused is not None:
            raise ack.refused

    def _resume(self, deadline: float) -> None:
        """Ask the shard which blocks it has, and send those that it lacks."""
        pushes = [*self._kept, *self._sent, *self._waiting]
        arguments = self._client, pushes[0].position, np.array(sorted(self._envs), np.int64)
        ack: Ack = self._calls.ask("resume", {self._shard: arguments}, deadline)[self._shard]
        self._kept = deque(push for push in pushes if push.end <= ack.applied)
        self._sent, self._waiting = [], [push for push in pushes if push.end > ack.applied]
        self._forget(ack)
        self._send()
        if ack.lost:
            self.lost += ack.lost
            warnings.warn(f"shard {self._shard}: restarted, and lost {ack.lost} rows.", stacklevel=2)

    def _forget(self, ack: Ack) -> None:
        while self._kept and self._kept[0].end <= ack.durable:
            self._kept.popleft()
        kept = sum(push.block.nbytes for push in self._kept)
        while kept > KEPT_BYTES:
            kept -= self._kept.popleft().block.nbytes
