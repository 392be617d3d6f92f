"""A process that rewrites rows, and rows in which mixing is recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import relive as rl
from relive.concurrent import Handle
from relive.replay import native_backend

WIDTH, ROWS = 1 << 15, 12
make_ring = native_backend._make_native_ring
FALSE = np.zeros(1, bool)


def make_buffer(memory: rl.Memory) -> rl.ReplayBuffer:
    """Return a buffer with two mutable fields, which always hold the same number."""
    extra = {"wide": rl.Mutable(rl.Field(WIDTH, torch.int64)), "mark": rl.Mutable(rl.Field((), torch.int64))}
    return rl.ReplayBuffer(ROWS, 1, (), num_envs=1, extra=extra, device=memory, seed=0)


def fill(replay: rl.ReplayBuffer, rows: int = ROWS) -> None:
    for t in range(rows):
        wide, mark = np.full((1, WIDTH), 0), np.zeros(1, np.int64)
        number = np.array([[float(t)]])
        replay.add(number, number[0], number[0], FALSE, FALSE, number + 1, wide=wide, mark=mark)


def torn_rows(rows: Any) -> list[int]:
    """Ids of the rows whose two fields differ."""
    wide, mark = rows["wide"], rows["mark"]
    whole = (wide == mark.unsqueeze(1)).all(1)
    return rows["index"][~whole].tolist()


def make_ring_without_journal(rows: Any) -> Any:
    """For a canary: replaces `native_backend._make_native_ring` and omits the journal of rewrites."""
    journal, rows.rewrite_journal = rows.rewrite_journal, None
    ring = make_ring(rows)
    rows.rewrite_journal = journal
    return ring


def rewrite_until_killed(where: Handle | Path, counts: Path, careless: bool) -> None:
    """Rewrite all rows, pass after pass; `counts` [2] holds the passes begun and done."""
    torch.set_num_threads(1)
    if careless:
        native_backend._make_native_ring = make_ring_without_journal
    replay = make_buffer(rl.Memory.disk(where)) if isinstance(where, Path) else rl.connect(where, seed=1)
    ids, told = replay.ids(), np.memmap(counts, np.int64, "r+", shape=(2,))
    wide, mark = torch.zeros(len(ids), WIDTH, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.int64)
    for number in range(int(told[0]) + 1, 1 << 30):
        told[0] = number
        replay.write(ids, wide=wide.fill_(number), mark=mark.fill_(number))
        told[1] = number
