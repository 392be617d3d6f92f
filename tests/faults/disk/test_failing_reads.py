"""B1 for disk memory: whichever call of the system fails while a folder is reopened, the error is typed."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from tests.tiers import select
from tests.totals import tell

CALLS = (
    "open", "fstat", "stat", "read", "readv", "listdir", "scandir", "pwrite", "statvfs", "posix_fallocate", "lseek",
    "fsync", "fdatasync", "truncate", "rename", "mkdir", "unlink",
)  # fmt: skip


def make(root: Path) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(20, obs=2, action=(), device=rl.Memory.disk(root))


def fill(root: Path) -> rl.ReplayBuffer:
    replay = make(root)
    for step in range(30):
        replay.add([step, 0.0], 0.5, 1.0, terminated=step % 7 == 6, truncated=False, next_obs=[step + 1, 0.0])
    replay.commit()
    return replay


def contents(replay: Any) -> tuple[list[int], list[float]]:
    ids = replay.ids()
    return ids.tolist(), replay[ids]["obs"].flatten().tolist()


class FailingSystem:
    """Counts the calls of the system, and fails the one numbered `point`."""

    def __init__(self, patch: pytest.MonkeyPatch, point: int) -> None:
        self.point, self.count, self.failed = point, 0, ""
        for name in CALLS:
            patch.setattr(os, name, self.watch(name, getattr(os, name)))
        patch.setattr(mmap, "mmap", self.watch("mmap", mmap.mmap))
        patch.setattr(Path, "read_text", self.watch("read_text", Path.read_text))

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.point:
                self.failed = f"{name}{arguments[:1]}"
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*arguments, **options)

        return watched


@pytest.mark.promise("B1")
@pytest.mark.parametrize(("reopen", "is_closed"), select((rl.load, False), of=product((rl.load, make), (True, False))))
def test_any_failing_system_call_is_a_typed_error_and_the_folder_reopens(
    reopen: Callable[[Path], Any], is_closed: bool, tmp_path: Path
) -> None:
    template = tmp_path / "template"
    replay = fill(template)
    expected = contents(replay)
    if is_closed:
        replay.close()
    point, raised, is_done = 0, 0, False
    while not is_done:
        point += 1
        root = tmp_path / f"{point}"
        shutil.copytree(template, root)
        names, message, reopened = set(os.listdir(root)), "", None
        with pytest.MonkeyPatch.context() as patch:
            system = FailingSystem(patch, point)
            try:
                reopened = reopen(root)
            except rl.CheckpointError as error:
                message = str(error)
            is_done = system.count < point
        if message:
            raised += 1
            assert str(root) in message or any(name in message for name in names), f"{system.failed}: {message}"
            assert names <= set(os.listdir(root)), f"{system.failed}: files were removed"
        elif reopened is not None:
            assert contents(reopened) == expected
            reopened.close()
        with rl.load(root, rl.ReplayBuffer) as again:
            assert contents(again) == expected, system.failed
        shutil.rmtree(root)
    if not is_closed:
        replay.close()
    tell(f"B1: {reopen.__name__} of disk memory, EIO at {point - 1} calls, {raised} raised")
    assert raised >= 40
