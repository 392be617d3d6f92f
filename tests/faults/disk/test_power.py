"""A power failure: unsynchronised pages are on the disk, missing, or torn."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.replay.ring import MAX_ROWS_PER_STEP
from relive.storage.files import FileOperations
from tests.checkpoint.traffic import digest, equal
from tests.faults.disk.writer import LAYOUTS, Layout, Story, verify, write
from tests.tiers import select
from tests.totals import SEED, tell, trials

PAGE, SECTOR = 4096, 512


class Stopped(Exception):
    """Raised when the power fails."""


class Machine:
    """Records the synchronised contents of every file, and stops at an operation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, synchronises: bool = True) -> None:
        self.synced: dict[Path, bytes] = {}
        """Contents of each file at its last synchronisation."""
        self.left = -1
        """Operations before the power fails; negative for never."""
        paths: dict[int, Path] = {}
        machine = self

        class Watched(FileOperations):
            def create_for_update(self, name: str) -> int:
                file = super().create_for_update(name)
                paths[file] = self.root / name
                return file

            def open_for_update(self, name: str, *, only_reads: bool) -> int:
                file = super().open_for_update(name, only_reads=only_reads)
                paths[file] = self.root / name
                machine.synced[self.root / name] = (self.root / name).read_bytes()
                return file

            def grow(self, file: int, nbytes: int) -> None:
                super().grow(file, nbytes)
                machine.synced.setdefault(paths[file], bytes(nbytes))

            def sync_data(self, file: int) -> None:
                machine.count()
                super().sync_data(file)
                if synchronises:
                    machine.synced[paths[file]] = paths[file].read_bytes()

            def overwrite(self, file: int, data: bytes) -> None:
                machine.count()
                super().overwrite(file, data)

        monkeypatch.setattr("relive.storage.disk.FileOperations", Watched)

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stopped

    def after(self, root: Path, target: Path, rng: random.Random) -> None:
        """Write a possible state of a folder after a power failure."""
        chance = rng.choice((0.0, 1.0, rng.random()))
        target.mkdir()
        for path in root.iterdir():
            new = path.read_bytes()
            old = self.synced.get(path, b"" if path.name.startswith("commit") else new)
            (target / path.name).write_bytes(b"".join(_pages(old, new, chance, rng)))


def _pages(old: bytes, new: bytes, chance: float, rng: random.Random) -> Iterator[bytes]:
    for at in range(0, max(len(old), len(new)), PAGE):
        before, after = old[at : at + PAGE], new[at : at + PAGE]
        if before == after or rng.random() < chance:
            yield after
        elif rng.random() < 0.7 or len(before) != len(after):
            yield before
        else:
            for sector in range(0, len(after), SECTOR):
                yield (before if rng.random() < 0.5 else after)[sector : sector + SECTOR]


def last_commit_number(replay: Any) -> int:
    """Return the number of the last completed commit."""
    return replay._allocator._number


def lose_power(path: Path, name: str, machine: Machine, rng: random.Random, states: int) -> tuple[int, int]:
    """Write, fail the power at some moment, reopen; return the numbers of rows written and rows found."""
    layout = LAYOUTS[name]
    layout = Layout(**{**vars(layout), "width": min(layout.width, 1 << 12)})
    root = path / "memory"
    every = rng.choice((4, 12, 40))
    memory = rl.Memory.disk(root, commit_every=every)
    replay = layout.make(memory)
    story, clock = Story(layout, [0]), np.zeros(layout.envs, np.int64)
    committed: dict[int, np.ndarray] = {last_commit_number(replay): clock.copy()}
    machine.left = rng.choice((-1, rng.randrange(1, 200)))
    try:
        for turn in range(rng.randrange(2, 90)):
            before = clock.copy()
            write(replay, story, clock, turn)
            committed.setdefault(last_commit_number(replay), before)
            if rng.random() < 0.1:
                replay.commit()
                committed[last_commit_number(replay)] = clock.copy()
    except Stopped:
        pass
    machine.left = -1
    due, left = committed[last_commit_number(replay)], 0
    for state in range(states):
        found = path / f"found{state}"
        machine.after(root, found, rng)
        again = rl.load(found, rl.ReplayBuffer)
        reach = max(every, MAX_ROWS_PER_STEP * layout.block)
        check_after_power_loss(again, story, due, clock + layout.block, reach)
        once = digest(again)
        left += len(again)
        shutil.copytree(found, path / "twice")
        del again
        assert equal(digest(rl.load(path / "twice")), once)
        for folder in (found, path / "twice"):
            shutil.rmtree(folder)
    del replay
    shutil.rmtree(root)
    return int(clock.sum()) * states, left


def check_after_power_loss(
    replay: rl.ReplayBuffer, story: Story, committed: np.ndarray, begun: np.ndarray, reach: int
) -> None:
    """Assert that every row is exact, and that at most the `reach` oldest committed rows are missing."""
    layout, ids = story.layout, replay.ids()
    steps = (replay[ids]["action"] // layout.envs).numpy() if len(ids) else np.zeros(0, np.int64)
    oldest, due = committed.copy(), committed.copy()
    for e in range(layout.envs):
        held = steps[ids.numpy() % layout.envs == e]
        oldest[e] = min(held, default=committed[e])
        # Ends of episodes and resets take rows, too.
        full = int(0.75 * min(committed[e], layout.rows)) - reach - 2 * MAX_ROWS_PER_STEP - layout.frames
        assert sum(held < committed[e]) >= full, f"environment {e}: {held} of {committed[e]} steps, {reach} at risk"
        due[e] = max(oldest[e], committed[e])
    first = int(oldest.min())
    verify(replay, story, [(first, np.where(oldest < committed, due, first), begun)], oldest)


@pytest.fixture
def other_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every reopening look like one after a reboot."""
    count = iter(range(1 << 30))
    monkeypatch.setattr("relive.storage.disk.read_boot_id", lambda: f"boot{next(count)}")


def lose_power_often(path: Path, monkeypatch: pytest.MonkeyPatch, count: int, states: int, **how: Any) -> None:
    rng, written, left = random.Random(SEED), 0, 0
    for trial in range(count):
        name = list(LAYOUTS)[trial % len(LAYOUTS)]
        more = lose_power(path, name, Machine(monkeypatch, **how), rng, states)
        written, left = written + more[0], left + more[1]
    tell(f"A7: {count} losses of power × {states} states, {left} rows found of {written} added, seed {SEED}")
    assert left > written // 20


@pytest.mark.promise("A7")
@pytest.mark.usefixtures("other_boot")
@pytest.mark.parametrize("count", select(len(LAYOUTS), of=[len(LAYOUTS), 28]))
def test_committed_rows_survive_a_power_failure(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_power_often(tmp_path, monkeypatch, trials("A7_POWER", count), 2)


@pytest.mark.long
@pytest.mark.usefixtures("other_boot")
def test_committed_rows_survive_many_power_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_power_often(tmp_path, monkeypatch, trials("A7_POWER_LONG", 1_000), 4)
