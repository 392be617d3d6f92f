"""Canaries: deliberately broken variants of disk memory, each of which a check must detect."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.replay.native_backend import NativeBackend
from relive.replay.ring import Ring
from relive.storage.disk import DiskAllocator
from tests.faults.disk.test_kills import killed_after
from tests.faults.disk.test_power import Machine, lose_power, other_boot  # noqa: F401 (a fixture)
from tests.faults.disk.writer import LAYOUTS, Story, verify, write

pytestmark = pytest.mark.thorough


def accept_all_rows(storage: NativeBackend, *_: Any) -> torch.Tensor:
    """Mask of torn rows that accepts every row."""
    return torch.zeros_like(storage.rows.ring.first)


def cut_off(path: Path) -> tuple[Path, list[Any]]:
    """Return the disk memory of a writer killed within a row, with its story and lives."""
    for trial in range(200):
        root, counts = path / f"memory{trial}", path / "counts"
        killed_after(0.0, "large rows", root, counts, [0])
        begun, done, _ = np.fromfile(counts, np.int64).reshape(3, 1)
        head, journal = (np.fromfile(root / f"ring.{name}", np.int64) for name in ("head", "journal"))
        # The journal and the head show that the kill fell into a row.
        if journal.any() and (head == (journal - 1) // 2).all():
            return root, [(0, done, begun)]
    pytest.skip("no kill fell into a row")


def reopened(root: Path, lives: list[Any]) -> None:
    layout = LAYOUTS["large rows"]
    verify(rl.load(root, rl.ReplayBuffer), Story(layout, [0]), lives)


def publish_early(root: Path) -> None:
    """Forge the files of a writer that moves its head before the row is written, without a journal."""
    head, journal, count = (np.memmap(root / f"ring.{name}", np.int64, "r+") for name in ("head", "journal", "count"))
    kind, is_open = (np.memmap(root / f"ring.{name}", np.uint8, "r+") for name in ("kind", "open"))
    slot = head[0] % len(kind)
    kind[slot], kind[(head[0] + 1) % len(kind)] = 1, 3
    action = np.memmap(root / "column1", np.uint8, "r+").reshape(len(kind), -1)
    # The kill may have come after the last byte of the row, which is therefore changed.
    action[slot] ^= 0xFF
    count[0] = (kind == 1).sum()
    is_open[0] = 1
    head += 1
    journal[:] = 0


def test_a_head_that_moves_before_its_row_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, lives = cut_off(tmp_path)
    early = tmp_path / "early"
    shutil.copytree(root, early)
    publish_early(early)
    shutil.copytree(early, tmp_path / "sealed")
    reopened(root, lives)
    # The row's checksum is wrong, so that the buffer is rolled back to the last commit.
    sealed = rl.load(tmp_path / "sealed")
    sealed.check()
    monkeypatch.setattr(NativeBackend, "find_damaged_rows", accept_all_rows)
    with pytest.raises((AssertionError, rl.CorruptCheckpoint)):
        reopened(early, lives)


def test_rows_not_compared_with_their_checksums_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, story = LAYOUTS["several environments"], Story(LAYOUTS["several environments"], [0])
    replay = layout.make(rl.Memory.disk(tmp_path / "memory"))
    clock = np.zeros(layout.envs, np.int64)
    for turn in range(20):
        write(replay, story, clock, turn)
    row = int(replay.storage.rows.ring.head[0]) - 2
    obs = np.memmap(tmp_path / "memory" / "column0", np.uint8, "r+").reshape(-1, layout.envs, layout.width)
    obs[row % len(obs), 0, 40] ^= 4
    del replay
    lives: list[Any] = [(0, np.zeros(layout.envs, np.int64), clock)]
    shutil.copytree(tmp_path / "memory", tmp_path / "again")
    verify(rl.load(tmp_path / "again", rl.ReplayBuffer), story, lives)
    monkeypatch.setattr(NativeBackend, "find_damaged_rows", accept_all_rows)
    with pytest.raises(AssertionError):
        verify(rl.load(tmp_path / "memory", rl.ReplayBuffer), story, lives)


def lose_power_again_and_again(path: Path, machine: Machine, rng: random.Random) -> None:
    for trial in range(30):
        (path / f"{trial}").mkdir()
        lose_power(path / f"{trial}", "several environments", machine, rng, 2)


@pytest.mark.usefixtures("other_boot")
def test_a_commit_before_its_data_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, rng = Machine(monkeypatch), random.Random(0)
    monkeypatch.setattr(DiskAllocator, "_sync_arrays", lambda _: None)
    with pytest.raises((AssertionError, rl.CorruptCheckpoint, rl.InvariantError)):
        lose_power_again_and_again(tmp_path, machine, rng)


@pytest.mark.usefixtures("other_boot")
def test_kept_rows_that_might_be_overwritten_are_detected(tmp_path: Path, monkeypatch: Any) -> None:
    roll_back = Ring.roll_back
    monkeypatch.setattr(
        "relive.replay.ring.Ring.roll_back", lambda ring, head, was, where, _: roll_back(ring, head, was, where, 0)
    )
    machine, rng = Machine(monkeypatch), random.Random(0)
    with pytest.raises((AssertionError, rl.CorruptCheckpoint, rl.InvariantError)):
        lose_power_again_and_again(tmp_path, machine, rng)
