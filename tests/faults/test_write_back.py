"""A process is killed while it rewrites rows in shared or disk memory: each row is old or new, never mixed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from tests.faults import rewriter
from tests.faults.processes import CONTEXT
from tests.faults.rewriter import fill, make_buffer, torn_rows
from tests.totals import SEED, tell, trials

pytestmark = pytest.mark.skipif(
    not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="needs Linux and a compiler"
)


def killed_while_writing(where: Any, counts: Path, seconds: float, *, careless: bool = False) -> tuple[int, int]:
    """Kill a process some seconds after its first pass; return the last passes begun and done."""
    process: Any = CONTEXT.Process(target=rewriter.rewrite_until_killed, args=(where, counts, careless))
    passes = np.memmap(counts, np.int64, "r", shape=(2,))
    before = int(passes[1])
    process.start()
    while passes[1] == before:
        assert process.exitcode is None
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return int(passes[0]), int(passes[1])


def require_whole(replay: rl.ReplayBuffer, begun: int, done: int) -> bool:
    """Assert that every row is of the last pass or the one before; return whether both occur."""
    rows = replay[replay.ids()]
    assert len(rows) >= rewriter.ROWS - 1
    assert not torn_rows(rows), "a torn row"
    marks = set(rows["mark"].tolist())
    assert marks <= {begun, done}, f"rows of the passes {marks}, got to {done}, begun {begun}"
    replay.check()
    return len(marks) == 2


def disk_trial(root: Path, counts: Path, seconds: float, *, careless: bool = False) -> bool:
    begun, done = killed_while_writing(root, counts, seconds, careless=careless)
    with rl.load(root, rl.ReplayBuffer) as replay:
        return require_whole(replay, begun, done)


@pytest.mark.promise("A7")
def test_a_kill_on_disk_leaves_rows_old_or_new(tmp_path: Path) -> None:
    min_kills, rng, inside, count = trials("WRITE_BACK_DISK", 3), random.Random(SEED), 0, 0
    np.zeros(2, np.int64).tofile(tmp_path / "counts")
    with make_buffer(rl.Memory.disk(tmp_path / "memory")) as replay:
        fill(replay)
    while count < min_kills or (not inside and count < 40):
        inside += disk_trial(tmp_path / "memory", tmp_path / "counts", rng.uniform(0, 0.03))
        count += 1
    tell(f"A7: {count} kills while rows on disk were written back, {inside} inside a call, no row torn, seed {SEED}")
    assert inside


@pytest.mark.promise("E3")
def test_a_kill_in_shared_memory_leaves_rows_old_or_new(tmp_path: Path) -> None:
    min_kills, rng, inside, seen, count = trials("WRITE_BACK", 10), random.Random(SEED), 0, 0, 0
    np.zeros(2, np.int64).tofile(tmp_path / "counts")
    replay = make_buffer(rl.Memory.shared())
    fill(replay)
    while count < min_kills or (not inside and count < 40):
        begun, done = killed_while_writing(replay.handle(), tmp_path / "counts", rng.uniform(0, 0.03))
        inside += require_whole(replay, begun, done)
        count += 1
    process: Any = CONTEXT.Process(
        target=rewriter.rewrite_until_killed, args=(replay.handle(), tmp_path / "counts", False), daemon=True
    )
    process.start()
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert not torn_rows(replay.sample(4))
        steps = replay.sample(4, rl.Sequence(3))
        assert bool((steps["wide"] == steps["mark"].unsqueeze(-1)).all())
        seen += 16
    process.kill()
    process.join()
    tell(f"E3: {count} kills while shared rows were written back, {inside} inside a call, {seen} rows read beside it")
    assert inside


@pytest.mark.thorough
def test_a_row_without_a_journal_entry_is_detected(tmp_path: Path) -> None:
    """Canary: without the journal, a kill leaves a torn row."""
    np.zeros(2, np.int64).tofile(tmp_path / "counts")
    replay = make_buffer(rl.Memory.shared())
    fill(replay)
    rng = random.Random(SEED)
    torn: list[int] = []
    for _ in range(60):
        killed_while_writing(replay.handle(), tmp_path / "counts", rng.uniform(0, 0.02), careless=True)
        torn += torn_rows(replay[replay.ids()])
        if torn:
            return
    pytest.fail("60 kills, and no row was torn")


@pytest.mark.thorough
def test_a_copy_without_the_lock_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary: mutable fields copied without the lock are torn by another process."""
    np.zeros(2, np.int64).tofile(tmp_path / "counts")
    replay = make_buffer(rl.Memory.shared())
    fill(replay)
    process: Any = CONTEXT.Process(
        target=rewriter.rewrite_until_killed, args=(replay.handle(), tmp_path / "counts", False), daemon=True
    )
    process.start()
    monkeypatch.setattr(replay.storage.rows, "mutable", ())
    until = time.monotonic() + 20
    torn: list[int] = []
    while not torn and time.monotonic() < until:
        torn = torn_rows(replay.sample(8))
    process.kill()
    process.join()
    assert torn
