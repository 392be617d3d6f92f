"""One client's rows on their way to one shard: in order, each once, and never more than memory allows."""

from __future__ import annotations

import time
import warnings
from collections import deque
from typing import Any

import numpy as np

from relive.distributed.block import Block
from relive.distributed.calls import Calls, Interrupted
from relive.distributed.shard import Ack, Push
from relive.replay.chains import speak

KEPT_BYTES = 64 << 20
"""Blocks that the shard has but no checkpoint has yet are kept up to this size, to be sent again after a restart."""


class Stream:
    """Blocks are pushed without waiting, at most `max_pending` at once; then the shard's answer is waited for.

    One call is under way at a time, and blocks that come meanwhile go together in the next one: the busier a shard is,
    the fewer calls it gets for the same rows. A block is kept until a checkpoint has it, or until newer ones need the
    room. When the shard has started again and has forgotten some, they are sent again; those that are not kept any more
    are lost.
    """

    patience = 2e-3
    """Seconds in which nobody asks whether a call was answered: asking costs, and blocks that wait go together."""

    def __init__(self, calls: Calls, shard: int, client: str, max_pending: int) -> None:
        self._calls, self._shard, self._client, self._max_pending = calls, shard, client, max_pending
        self._position = 0
        """How many rows were pushed."""
        self._kept: deque[Push] = deque()
        """The shard has said that it has them; a checkpoint has not."""
        self._flying: list[Push] = []
        """Under way."""
        self._waiting: list[Push] = []
        self._answer: Any = None
        """What the call under way will bring."""
        self._asked = 0.0
        self._envs: set[int] = set()
        self.lost = 0

    @property
    def pending(self) -> int:
        """How many blocks the shard has not said to have."""
        return len(self._flying) + len(self._waiting)

    def make_room(self, deadline: float) -> None:
        """Wait until another block may be pushed. Raises before anything is accepted, so that it can be retried."""
        if self._is_answered():
            self._settle(deadline)
        while self.pending >= self._max_pending:
            self._settle(deadline)

    def go_on(self, deadline: float) -> None:
        """Send what waits, if the call before has been answered: whoever has stopped pushing does not come past."""
        if self._waiting and self._is_answered():
            self._settle(deadline)

    def _is_answered(self) -> bool:
        now = time.monotonic()
        if not self._flying or now - self._asked <= self.patience:
            return False
        self._asked = now
        return self._calls.is_answered(self._answer)

    def push(self, envs: np.ndarray, block: Block, cut: np.ndarray) -> None:
        """Take a block, for which room was made."""
        push = Push(self._position, envs, block, cut)
        self._position = push.end
        self._envs.update(envs.tolist())
        self._waiting.append(push)
        self._send()

    def flush(self, deadline: float) -> None:
        """Wait until the shard has everything, also if it has started again since it said so."""
        self._settle_all(deadline)
        if self._kept:
            self._resume(deadline)
            self._settle_all(deadline)

    def _settle_all(self, deadline: float) -> None:
        while self.pending:
            self._settle(deadline)

    def _send(self) -> None:
        if self._waiting and not self._flying:
            self._answer = self._calls.start(self._shard, "push", self._client, self._waiting)
            self._asked = time.monotonic()
            self._flying, self._waiting = self._waiting, []

    def _settle(self, deadline: float) -> None:
        """Take in the answer to the call under way."""
        try:
            ack: Ack = self._calls.fetch(self._shard, self._answer, deadline)
        except Interrupted:
            return self._resume(deadline)
        if ack.applied < self._flying[-1].end:  # the shard has started again without what came before
            return self._resume(deadline)
        self._kept.extend(self._flying)
        self._flying = []
        self._forget(ack)
        self._send()
        for doubt in ack.doubts:
            speak(doubt)
        if ack.refused is not None:
            raise ack.refused

    def _resume(self, deadline: float) -> None:
        """Agree with the shard on what it has, and send what it has not."""
        pushes = [*self._kept, *self._flying, *self._waiting]
        arguments = self._client, pushes[0].position, np.array(sorted(self._envs), np.int64)
        ack: Ack = self._calls.ask("resume", {self._shard: arguments}, deadline)[self._shard]
        self._kept = deque(push for push in pushes if push.end <= ack.applied)
        self._flying, self._waiting = [], [push for push in pushes if push.end > ack.applied]
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
