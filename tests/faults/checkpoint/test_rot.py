"""Segments that later saves reuse: a changed one is detected and its rows are written again."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.checkpoint.saving import save
from relive.storage.files import FileOperations
from tests.checkpoint.traffic import KINDS, digest, equal

REUSES = [kind for kind in KINDS if kind != "rollout"]


def flip(path: Path, *, keeps_time: bool) -> None:
    """Flip one bit of a file and optionally restore its modification time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 1)
        last = file.read(1)[0]
        file.seek(path.stat().st_size - 1)
        file.write(bytes([last ^ 1]))
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def saved(kind: str, root: Path) -> Any:
    buffer = KINDS[kind].make()
    for n in range(4):
        KINDS[kind].act(buffer, n)
    buffer.save(root)
    return buffer


@pytest.mark.parametrize("keeps_time", [False, True])
@pytest.mark.parametrize("reloads", [False, True])
@pytest.mark.parametrize("kind", REUSES)
def test_a_rotten_bit_does_not_spread_to_later_saves(
    kind: str, reloads: bool, keeps_time: bool, tmp_path: Path
) -> None:
    buffer = saved(kind, tmp_path)
    if reloads:
        buffer = rl.load(tmp_path)
    flip(tmp_path / "segments" / "00000001-0.bin", keeps_time=keeps_time)
    for n in range(4, 6):
        KINDS[kind].act(buffer, n)
        if n == 4:
            with pytest.warns(UserWarning, match="save: a file that was saved before is damaged.*00000001-0.bin"):
                buffer.save(tmp_path)
        else:
            buffer.save(tmp_path)
        assert equal(digest(rl.load(tmp_path)), digest(buffer))


class Counting(FileOperations):
    """`FileOperations` that count the bytes read and written."""

    wrote = looked = 0

    def write(self, file: int, data: memoryview | bytes) -> None:
        Counting.wrote += len(memoryview(data).cast("B"))
        super().write(file, data)

    def read(self, file: int, count: int) -> bytes:
        found = super().read(file, count)
        Counting.looked += len(found)
        return found

    def read_into(self, file: int, target: memoryview) -> int:
        count = super().read_into(file, target)
        Counting.looked += count
        return count


def large(root: Path) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(4096, 1024, 1, seed=0)
    zeros = {"obs": 1024, "action": 1, "next_obs": 1024}
    block = {name: np.zeros((1024, size), np.float32) for name, size in zeros.items()}
    flags = {name: np.zeros(1024, bool) for name in ("terminated", "truncated")}
    replay.extend({**block, **flags, "reward": np.zeros(1024, np.float32)})
    save(replay, root, files=Counting)
    return replay


def test_saves_that_reuse_segments_do_not_read_them_again(tmp_path: Path) -> None:
    replay = large(tmp_path)
    Counting.wrote = Counting.looked = 0
    save(replay, tmp_path, files=Counting)
    assert Counting.looked < 1 << 17
    assert Counting.wrote < 1 << 18


def test_a_segment_that_was_only_copied_or_linked_is_read_and_reused(tmp_path: Path) -> None:
    replay = large(tmp_path / "root")
    segment = tmp_path / "root" / "segments" / "00000001-0.bin"
    shutil.copy(segment, tmp_path / "copy")
    os.replace(tmp_path / "copy", segment)
    # The first save verifies the segment; the second one relies on its stamp.
    for expected in (segment.stat().st_size, 0):
        Counting.wrote = Counting.looked = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(replay, tmp_path / "root", files=Counting)
        assert expected <= Counting.looked < expected + (1 << 17)
        assert Counting.wrote < 1 << 18
