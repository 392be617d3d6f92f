"""One client's rows on their way to one shard: in order, each once, and never more than memory allows."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect.distributed.block import Block
from recollect.distributed.calls import Calls, Interrupted
from recollect.distributed.shard import Ack
from recollect.errors import ShardUnavailable

KEPT_BYTES = 64 << 20
"""Blocks that the shard has but no checkpoint has yet are kept up to this size, to be sent again after a restart."""


@dataclass
class _Sent:
    position: int
    end: int
    arguments: tuple[np.ndarray, Block, np.ndarray]
    ref: Any = None
    """The answer to come, until it is there."""


class Stream:
    """Blocks are pushed without waiting, at most `max_pending` at once; then the shard's answers are waited for.

    A block is kept until a checkpoint has it, or until newer ones need the room. When the shard has started again and
    has forgotten some, they are sent again; those that are not kept any more are counted as lost.
    """

    def __init__(self, calls: Calls, shard: int, client: str, max_pending: int) -> None:
        self._calls, self._shard, self._client, self._max_pending = calls, shard, client, max_pending
        self._position = 0
        """How many rows were pushed."""
        self._window: deque[_Sent] = deque()
        self._envs: set[int] = set()
        self.lost = 0

    @property
    def pending(self) -> int:
        """How many blocks wait for an answer."""
        return sum(sent.ref is not None for sent in self._window)

    def make_room(self, deadline: float) -> None:
        """Wait until another block may be pushed. Raises before anything is accepted, so that it can be retried."""
        while self.pending >= self._max_pending:
            self._settle(deadline)

    def push(self, envs: np.ndarray, block: Block, cut: np.ndarray) -> None:
        """Send a block, for which room was made."""
        rows = (len(block.leaves[0]) - 1) * len(envs)
        sent = _Sent(self._position, self._position + rows, (envs, block, cut))
        self._position = sent.end
        self._envs.update(envs.tolist())
        self._window.append(sent)
        self._send(sent)

    def flush(self, deadline: float) -> None:
        """Wait until the shard has everything, also if it has started again since it said so."""
        if self._window:
            self._settle_all(deadline)
            self._resume(deadline)
            self._settle_all(deadline)

    def _settle_all(self, deadline: float) -> None:
        while self.pending:
            self._settle(deadline)

    def _send(self, sent: _Sent) -> None:
        sent.ref = self._calls.start(self._shard, "push", self._client, sent.position, *sent.arguments)

    def _settle(self, deadline: float) -> None:
        """Take in the oldest answer that is waited for."""
        sent = next(sent for sent in self._window if sent.ref is not None)
        try:
            ack: Ack = self._calls.fetch(self._shard, sent.ref, deadline)
        except Interrupted:
            self._resume(deadline)
        except ShardUnavailable:
            raise
        except Exception:  # the buffer has refused the block, and always will
            self._window.remove(sent)
            raise
        else:
            if ack.applied < sent.end:  # the shard has started again without what came before
                self._resume(deadline)
            else:
                sent.ref = None
                self._forget(ack)

    def _resume(self, deadline: float) -> None:
        """Agree with the shard on what it has, and send what it has not."""
        first = self._window[0].position if self._window else self._position
        arguments = self._client, first, np.array(sorted(self._envs), np.int64)
        ack: Ack = self._calls.ask("resume", {self._shard: arguments}, deadline)[self._shard]
        if ack.lost:
            self.lost += ack.lost
            warnings.warn(f"shard {self._shard} has started again without {ack.lost} rows that are gone.", stacklevel=2)
        for sent in self._window:
            sent.ref = None
            if sent.end > ack.applied:
                self._send(sent)
        self._forget(ack)

    def _forget(self, ack: Ack) -> None:
        while self._window and self._window[0].end <= ack.durable:
            self._window.popleft()
        kept = sum(sent.arguments[1].nbytes for sent in self._window)
        while kept > KEPT_BYTES and self._window[0].ref is None:
            kept -= self._window.popleft().arguments[1].nbytes
