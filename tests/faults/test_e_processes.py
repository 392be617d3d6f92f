"""E: several processes write and sample one buffer. Rows are complete, and a killed process does not stop another."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.faults.crowd import SAMPLERS, WRITERS, Board, look, sample, write
from tests.faults.processes import CONTEXT, killed
from tests.tiers import select
from tests.totals import tell, trials

ROWS = 256 - 256 % WRITERS
PATIENCE = 120.0
"""Seconds that a replaced writer has for its first step on a busy machine."""
STALL = 5_000_000
"""Longest permitted wait for a killed process, in microseconds."""
pytestmark = pytest.mark.skipif(
    not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="needs Linux and a compiler"
)


def shared(width: int, sampler: Any) -> rl.ReplayBuffer:
    obs, action = rl.Field(width, torch.uint8), rl.Field((), torch.int64)
    return rl.ReplayBuffer(ROWS, obs, action, num_envs=WRITERS, sampler=sampler, device=rl.Memory.shared(), seed=0)


@contextmanager
def samplers(replay: rl.ReplayBuffer, board: Board, batch_size: int) -> Iterator[None]:
    running = [
        CONTEXT.Process(target=sample, args=(replay.handle(), board.place, WRITERS + i, batch_size), daemon=True)
        for i in range(SAMPLERS)
    ]
    for process in running:
        process.start()
    yield
    for process in running:
        assert process.is_alive(), "a sampler ended"
        process.kill()
        process.join()


def crowd(width: int, rows: int, seconds: float, sampler: Any) -> Board:
    """E1: run writers and samplers at the same time."""
    replay, board = shared(width, sampler), Board()
    start = time.monotonic()
    steps = rows // WRITERS
    with samplers(replay, board, 8):
        args = [(replay.handle(), board.place, env, width, steps) for env in range(WRITERS)]
        writers = [CONTEXT.Process(target=write, args=each, daemon=True) for each in args]
        for process in writers:
            process.start()
        for process in writers:
            process.join(max(seconds - (time.monotonic() - start), 0.1))
        late = [process for process in writers if process.is_alive()]
        for process in late:  # the time is over on a slow machine
            process.kill()
            process.join()
        assert late or all(process.exitcode == 0 for process in writers)
    replay.check()
    newest = replay[replay.ids()]["action"]
    for env in range(WRITERS):
        kept = newest[newest % WRITERS == env].sort().values // WRITERS
        last = int(board[env, "done"])
        expected = torch.arange(last - min(last, ROWS // WRITERS), last)
        lost = expected[~torch.isin(expected, kept)]
        # Undoing the step of a killed writer drops a few of the oldest rows.
        assert len(lost) <= (5 if late else 0), lost
    look(replay[replay.ids()], board, 60)
    tell(
        f"E1: {WRITERS} processes wrote {board.total('done')} rows of {width} bytes, {SAMPLERS} read "
        f"{board.total('seen')} observations in {time.monotonic() - start:.1f} s: {board.total('torn')} torn, "
        f"{board.total('unknown')} unknown; longest call {board.numbers[:, -1].max() / 1e6:.2f} s"
    )
    return board


def killing(width: int, kills: int, sampler: Any, seed: int) -> Board:
    """E3: kill a random writer every 100 ms and start another in its place."""
    replay, board = shared(width, sampler), Board()
    random_ = random.Random(seed)
    start = time.monotonic()

    def started(env: int) -> Any:
        process = CONTEXT.Process(target=write, args=(replay.handle(), board.place, env, width, 1 << 40), daemon=True)
        process.start()
        return process

    with samplers(replay, board, 4):
        writers = [started(env) for env in range(WRITERS)]
        while not all(board[env, "done"] for env in range(WRITERS)):
            time.sleep(0.01)
        for _ in range(kills):
            time.sleep(0.1 * random_.uniform(0.5, 1.5))
            env = random_.randrange(WRITERS)
            writers[env].kill()
            writers[env].join()
            writers[env] = started(env)
        before = [int(board[env, "done"]) for env in range(WRITERS)]
        deadline = time.monotonic() + PATIENCE
        while not all(board[env, "done"] > before[env] for env in range(WRITERS)):
            assert time.monotonic() < deadline, "a writer never continued"
            time.sleep(0.01)
        for process in writers:
            process.kill()
            process.join()
    replay.check()
    look(replay[replay.ids()], board, 60)
    tell(
        f"E3: {kills + WRITERS} kills (seed {seed}) while {board.total('done')} rows of {width} bytes were written and "
        f"{board.total('seen')} observations read in {time.monotonic() - start:.1f} s: {board.total('mended')} steps "
        f"undone, {board.total('torn')} torn, {board.total('unknown')} unknown; longest call "
        f"{board.numbers[:, -1].max() / 1e6:.2f} s"
    )
    return board


def assert_whole(board: Board) -> None:
    assert board.total("seen") > 0
    assert board.total("torn") == board.total("unknown") == 0
    assert board.numbers[:, -1].max() < STALL


@pytest.mark.promise("E1")
@pytest.mark.parametrize(
    "sampler", select(rl.Prioritized(), of=[rl.Uniform(), rl.Prioritized()]), ids=["uniform", "prioritized"]
)
def test_rows_of_concurrent_processes_are_whole_and_complete(sampler: Any) -> None:
    board = crowd(1 << 16, 50_000, 20, sampler)
    assert_whole(board)


@pytest.mark.promise("E3")
@pytest.mark.parametrize(
    ("width", "sampler"),
    select((1 << 16, rl.Prioritized()), of=[(1 << 16, rl.Prioritized()), (1 << 20, rl.Uniform())]),
)
def test_other_processes_continue_with_whole_rows_when_a_writer_is_killed(width: int, sampler: Any) -> None:
    assert_whole(killing(width // 2, 20, sampler, random.randrange(1 << 30)))


@pytest.mark.long
def test_rows_are_whole_for_half_an_hour() -> None:
    assert_whole(crowd(1 << 16, 1 << 40, trials("E1_LONG", 1_800), rl.Prioritized()))


@pytest.mark.long
def test_five_thousand_writers_are_killed() -> None:
    start, kills = time.monotonic(), trials("E3_LONG", 5_000)
    for done in range(0, kills, 250):
        sampler = rl.Prioritized() if done % 500 else rl.Uniform()
        assert_whole(killing(1 << 19, min(250, kills - done), sampler, done))
    tell(f"E3: {kills} kills in {time.monotonic() - start:.0f} s")


def share_and_die(told: Path) -> None:
    replay = rl.ReplayBuffer(64, 4, (), device=rl.Memory.shared())
    replay.add(np.zeros(4, np.float32), 0.0, 0.0, False, False, np.ones(4, np.float32))
    told.write_text(str(rl.connect(replay.handle())))
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_processes_leave_nothing_behind(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    assert killed(share_and_die, tmp_path / "told")
    assert "1 of 64 rows" in (tmp_path / "told").read_text()
    deadline = time.monotonic() + PATIENCE
    while left := set(Path("/dev/shm").iterdir()) - before:  # parallel tests have files there for a moment
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
