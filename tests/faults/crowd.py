"""Processes that write and sample a shared replay buffer with rows in which mixing is recognised."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import numpy as np
import torch

import relive as rl
from relive.concurrent import Handle
from relive.replay.ring import Ring

WRITERS, SAMPLERS = 3, 2
PATTERN = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
"""Random bytes; a payload is a slice of them that starts at a different place for every tag."""


def payload(tag: int, width: int) -> np.ndarray:
    """Return `width` bytes that are unique to a tag: the tag and a slice of the pattern."""
    start = tag * 7919 % (len(PATTERN) - width)
    row = PATTERN[start : start + width].copy()
    row[:8] = np.array([tag], np.int64).view(np.uint8)
    return row


def read_tag(row: np.ndarray) -> int | None:
    """Return the tag of a payload; None if the bytes are mixed."""
    tag = int(row[:8].view(np.int64)[0])
    return tag if 0 <= tag < 1 << 40 and np.array_equal(payload(tag, len(row)), row) else None


class Board:
    """Counters [processes, columns] in shared memory, of which each process writes one row.

    The file is anonymous: it disappears with the last process.
    """

    COLUMNS = ("done", "began", "seen", "torn", "unknown", "mended", "pause")
    """Steps written; steps begun; observations read; torn observations; observations never written; steps undone after
    a kill; the longest time between two calls in microseconds."""

    def __init__(self, file: int | None = None, owner: int | None = None) -> None:
        size = 64 * len(self.COLUMNS) * 8
        if file is None:
            file, owner = os.memfd_create("board"), os.getpid()
            os.ftruncate(file, size)
        self.place = file, owner
        memory = mmap.mmap(os.open(f"/proc/{owner}/fd/{file}", os.O_RDWR), size)
        self.numbers = np.frombuffer(memory, np.int64).reshape(64, -1)

    def __getitem__(self, at: tuple[int | slice, str]) -> Any:
        return self.numbers[at[0], self.COLUMNS.index(at[1])]

    def __setitem__(self, at: tuple[int, str], value: int) -> None:
        self.numbers[at[0], self.COLUMNS.index(at[1])] = value

    def total(self, column: str) -> int:
        return int(self[slice(None), column].sum())


class _Worker:
    def __init__(self, handle: Handle, place: tuple[int, int], who: int) -> None:
        torch.set_num_threads(1)
        self.board, self.who = Board(*place), who
        mend = Ring.recover

        def count_and_mend(ring: Any) -> None:
            self.board[who, "mended"] += int((ring.journal > 0).sum())
            mend(ring)

        setattr(Ring, "recover", count_and_mend)  # noqa: B010 (only in this process)
        self.replay = rl.connect(handle, seed=who)
        self._last = time.monotonic()

    def record_pause(self) -> None:
        """Record the duration of the last call."""
        now = time.monotonic()
        self.board[self.who, "pause"] = max(self.board[self.who, "pause"], int(1e6 * (now - self._last)))
        self._last = now


def write(handle: Handle, place: tuple[int, int], env: int, width: int, total: int) -> None:
    """Write consecutive steps of an environment, continuing after the last step of a killed process."""
    worker = _Worker(handle, place, env)
    worker.replay.cut([env])
    board, flags = worker.board, np.zeros(1, bool)
    first = int(board[env, "began"])
    for step in range(first, total):
        tags = step * WRITERS + env, (step + 1) * WRITERS + env
        obs, following = (payload(tag, width)[None] for tag in tags)
        board[env, "began"] = step + 1
        worker.replay.add(obs, np.array([tags[0]]), np.zeros(1), flags, flags, following, env_ids=[env])
        board[env, "done"] += 1
        worker.record_pause()


def sample(handle: Handle, place: tuple[int, int], who: int, batch_size: int) -> None:
    """Sample batches and verify every byte until the process is killed."""
    worker = _Worker(handle, place, who)
    views = [rl.Transition(), rl.NStep(2, 0.9)]
    for turn in range(1 << 60):
        try:
            batch = worker.replay.sample(batch_size, views[turn % 2])
        except rl.NotReadyError:
            continue
        worker.record_pause()
        look(batch, worker.board, who)
        if "weight" in batch.keys():
            worker.replay.update_priority(batch["index"], torch.rand(batch_size))
        worker.record_pause()


def look(batch: Any, board: Board, who: int) -> None:
    """Count the observations of a batch, and those that are mixed or were never written."""
    for row, after, tag in zip(batch["obs"].numpy(), batch["next_obs"].numpy(), batch["action"].tolist(), strict=True):
        tags = read_tag(row), read_tag(after)
        board[who, "seen"] += 2
        board[who, "torn"] += None in tags or tags[0] != tag
        board[who, "unknown"] += any(one is not None and one // WRITERS > board[one % WRITERS, "began"] for one in tags)
