"""B: failing and full disks. `save` raises a typed error; the old checkpoint and the buffer stay unchanged."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.checkpoint.archive import Archive
from relive.checkpoint.saving import save
from relive.storage.files import FileOperations
from tests.checkpoint.traffic import KINDS, digest, equal
from tests.faults.checkpoint.disk import (
    count_operations,
    is_one_of,
    load_and_change,
    load_digest,
    save_old_checkpoint,
    watch_files,
)
from tests.tiers import select
from tests.totals import tell


@pytest.mark.promise("B1")
@pytest.mark.parametrize(
    ("kind", "code"),
    select(("prioritized", errno.EIO), ("rollout", errno.ENOSPC), of=product(KINDS, (errno.EIO, errno.ENOSPC))),
)
def test_the_old_checkpoint_loads_after_any_failing_operation(kind: str, code: int, tmp_path: Path) -> None:
    template = tmp_path / "template"
    old = save_old_checkpoint(kind, template)
    operations = count_operations(kind, template, tmp_path / "count")
    raised = 0
    for point in range(len(operations)):
        root = tmp_path / f"{point}"
        shutil.copytree(template, root)
        buffer = load_and_change(kind, root)
        new = digest(buffer)

        def fail(_: str, n: int, __: Any, point: int = point) -> None:
            if n == point:
                raise OSError(code, os.strerror(code))

        told = None
        try:
            save(buffer, root, files=watch_files(fail))
        except rl.CheckpointError as error:
            told = str(error)
        if told is not None:
            raised += 1
            assert os.strerror(code) in told
            assert leftovers(root) == set(), f"{code} at {point}"
            assert is_one_of(load_digest(root), old, new)
            assert equal(digest(rl.load(root, number=2)), old)
        else:
            # A later save removes the files that a failing save has left.
            assert equal(load_digest(root), new)
        assert equal(digest(buffer), new)
        buffer.save(root)
        assert equal(load_digest(root), new)
    tell(f"B1: {kind}, {errno.errorcode[code]} at {len(operations)} operations, {raised} raised")
    assert raised >= 10


def leftovers(root: Path) -> set[str]:
    """Files of a folder that none of its checkpoints needs."""
    archive = Archive(root)
    needed = {name for number in archive.checkpoint_numbers() for name in archive.read_manifest(number).file_sizes}
    found = (path for folder in ("tmp", "segments", "state") for path in (root / folder).glob("*"))
    return {str(path.relative_to(root)) for path in found} - needed


@pytest.mark.promise("B2")
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_an_error_with_the_bytes_needed_and_free(kind: str, tmp_path: Path) -> None:
    buffer = KINDS[kind].make()
    for n in range(20):
        KINDS[kind].act(buffer, n)
    buffer.save(tmp_path / "whole")
    largest = max(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    before, limit = digest(buffer), resource.getrlimit(resource.RLIMIT_FSIZE)
    for i in range(20):
        root = tmp_path / f"{i}"
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest * i // 20, limit[1]))
            with pytest.raises(rl.CheckpointError) as caught:
                save(buffer, root)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert caught.match(r"save to .*: expected room for about [\d,]+ bytes, got [\d,]+ bytes free")
        assert equal(digest(buffer), before)
        with pytest.raises(rl.NoCheckpoint):
            rl.load(root)
        buffer.save(root)
        assert equal(load_digest(root), before)
    tell(f"B2: {kind}, 20 sizes below {largest} bytes")


def test_a_full_disk_before_the_folder_exists_is_the_same_error(tmp_path: Path) -> None:
    class Full(FileOperations):
        def make_root(self, folders: tuple[str, ...] = ()) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(rl.CheckpointError, match="room for about .* bytes, got .* bytes free"):
        save(KINDS["uniform"].make(), tmp_path / "a" / "b", files=Full)


def test_files_are_removed_only_by_the_one_that_holds_the_lock(tmp_path: Path) -> None:
    """Another process may be reading, or may have written its segments but not yet its manifest."""
    held: list[bool] = []

    class Watching(FileOperations):
        def hold_lock(self, *, exclusive: bool) -> Any:
            held.append(exclusive)
            context = super().hold_lock(exclusive=exclusive)
            end = context.__exit__

            class Held:
                def __enter__(self) -> None:
                    context.__enter__()

                def __exit__(self, *error: Any) -> Any:
                    held.pop()
                    return end(*error)

            return Held()

        def remove(self, name: str) -> None:
            assert held == [True], name
            super().remove(name)

    buffer = KINDS["uniform"].make()
    for _ in range(4):
        save(buffer, tmp_path, keep=1, files=Watching)
    assert len(list((tmp_path / "manifests").iterdir())) == 1


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    files = FileOperations(tmp_path)
    files.make_root()
    with files.hold_lock(exclusive=True):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with (tmp_path / "LOCK").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
