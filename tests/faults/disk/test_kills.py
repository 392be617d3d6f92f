"""A7: a process that adds to disk memory is killed; reopening finds every completed row, exactly."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.replay.ring import TRANSITION
from tests.checkpoint.traffic import digest, equal
from tests.faults.disk import writer
from tests.faults.disk.writer import LAYOUTS, Life, Story, verify
from tests.faults.processes import CONTEXT, killed
from tests.tiers import select
from tests.totals import SEED, tell, trials


def killed_after(seconds: float, name: str, root: Path, counts: Path, begins: list[int]) -> None:
    """Kill a writer `seconds` after its first step; with 0 seconds, when its journal shows an unfinished step."""
    np.zeros((3, LAYOUTS[name].envs), np.int64).tofile(counts)
    process: Any = CONTEXT.Process(target=writer.write_until_killed, args=(name, root, counts, begins))
    process.start()
    progress = np.memmap(counts, np.int64, "r", shape=(3, LAYOUTS[name].envs))
    while not progress[2, 0]:
        assert process.exitcode is None
        time.sleep(0.001)
    if seconds:
        time.sleep(seconds)
    else:
        journal, nothing, until = _mapped(root / "ring.journal"), bytes(8 * LAYOUTS[name].envs), time.monotonic() + 1
        while journal[:] == nothing and time.monotonic() < until:
            pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def kill_writers(path: Path, count: int, seed: int) -> None:
    """Kill writers at random times. Each continues in the memory of the one that was killed before."""
    rng, rows, torn = random.Random(seed), 0, 0
    lives: dict[str, list[Life]] = {name: [] for name in LAYOUTS}
    for trial in range(count):
        name = list(LAYOUTS)[trial % len(LAYOUTS)]
        layout, root, counts = LAYOUTS[name], path / name, path / f"{name}.counts"
        before = lives[name][-50:]
        begins = [*(life[0] for life in before), int(before[-1][2].max()) + 1 if before else 0]
        killed_after(rng.choice((0.0, rng.uniform(0, 0.08))), name, root, counts, begins)
        begun, done, _ = np.fromfile(counts, np.int64).reshape(3, layout.envs)
        lives[name] = [*before, (begins[-1], done, begun)]
        rows += int((done - begins[-1]).sum())
        torn += bool(np.fromfile(root / "ring.journal", np.int64).any())
        again = path / "again"
        shutil.copytree(root, again)
        replay = rl.load(root)
        assert isinstance(replay, rl.ReplayBuffer)
        verify(replay, Story(layout, begins), lives[name])
        if len(replay):
            replay.sample(8 if len(replay) >= 8 else 1)
        # Recovery is idempotent.
        if trial % 5 == 0:
            first = rl.load(again)
            found = digest(first)
            del first
            assert equal(digest(rl.load(again)), found)
        shutil.rmtree(again)
        if trial % 3:
            replay.close()
        del replay
    tell(f"A7: {count} kills of writers, {rows} rows done, {torn} inside a step, none wrong, seed {seed}")


@pytest.mark.promise("A7")
@pytest.mark.parametrize("count", select(14, of=[14, 21]))
def test_a_killed_writer_leaves_every_row_that_was_added(count: int, tmp_path: Path) -> None:
    kill_writers(tmp_path, trials("A7", count), SEED)


@pytest.mark.long
def test_many_killed_writers_leave_every_row_that_was_added(tmp_path: Path) -> None:
    kill_writers(tmp_path, trials("A7_LONG", 3_000), SEED)


def test_a_kill_while_memory_is_made_leaves_none(tmp_path: Path) -> None:
    outcomes = {True: 0, False: 0}
    for line in range(0, 770, 52):
        root = tmp_path / str(line)
        assert killed(writer.open_until, "several environments", root, line, None, writer.CREATION)
        outcomes[(root / "FORMAT").exists()] += 1
        with LAYOUTS["several environments"].make(rl.Memory.disk(root)) as replay:
            assert not len(replay)
            replay.check()
    assert outcomes[False]


def mark_last_steps_unfinished(root: Path, envs: int) -> int:
    """Mark the last step of each environment as unfinished in the journal, because most kills fall between steps."""
    head, journal = (np.memmap(root / f"ring.{part}", np.int64, "r+") for part in ("head", "journal"))
    kind, first = (np.memmap(root / f"ring.{part}", np.uint8, "r").reshape(-1, envs) for part in ("kind", "first"))
    is_open = np.memmap(root / "ring.open", np.uint8, "r")
    cut = 0
    for e in range(envs):
        last = (head[e] - 1) % len(kind), e
        if is_open[e] and not journal[e] and kind[last] == TRANSITION and not first[last]:
            journal[e] = 1 + 2 * (head[e] - 1) + 1
            cut += 1
    return cut


@pytest.mark.thorough
@pytest.mark.parametrize("boot", [None, "another"], ids=["kill", "power loss"])
@pytest.mark.parametrize("name", select("stacked", of=["several environments", "stacked", "next step"]))
def test_a_kill_during_recovery_changes_nothing(name: str, boot: str | None, tmp_path: Path, monkeypatch: Any) -> None:
    layout = LAYOUTS[name]
    # No environment may have been within an episode at the kill.
    for attempt in range(10):
        root, counts = tmp_path / f"memory{attempt}", tmp_path / f"counts{attempt}"
        killed_after(0.15, name, root, counts, [0])
        if mark_last_steps_unfinished(root, layout.envs):
            break
    else:
        pytest.fail("ten kills, and no step to cut off")
    if boot is not None:
        monkeypatch.setattr("relive.storage.disk.read_boot_id", lambda: boot)
    whole = tmp_path / "whole"
    shutil.copytree(root, whole)
    expected = digest(rl.load(whole))
    kills = 0
    for line in range(3, 400, 37 if boot else 41):
        again = tmp_path / "again"
        shutil.copytree(root, again)
        if not killed(writer.open_until, name, again, line, boot, writer.RECOVERY):
            break
        kills += 1
        for more in (5, 20):
            killed(writer.open_until, name, again, more, boot, writer.RECOVERY)
        assert equal(digest(rl.load(again)), expected), f"killed at line {line}"
        shutil.rmtree(again)
    tell(f"A7: {kills} kills while {name} was mended ({'power loss' if boot else 'kill'})")
    assert kills >= 5
