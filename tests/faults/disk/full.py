"""A small disk that fills up: a mounted tmpfs with the rights to mount one, else a simulation."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from relive.storage.files import FileOperations


class MountedDisk:
    """A mounted tmpfs."""

    is_real = True

    def __init__(self, root: Path) -> None:
        self.root, self._filler = root, root / "filler"

    def fill(self) -> None:
        """Fill every free byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
        assert os.statvfs(self.root).f_bavail == 0

    def empty(self) -> None:
        """Free the filled bytes."""
        self._filler.unlink()


class PretendedDisk:
    """The real disk, with writes to unreserved bytes refused while it is "full"."""

    is_real = False

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self._is_full = root, False
        for name in ("create", "create_for_update", "grow", "overwrite", "reserve"):
            patch.setattr(FileOperations, name, self._limited(name, getattr(FileOperations, name)))

    def _limited(self, name: str, original: Any) -> Any:
        def call(files: FileOperations, file: Any, *arguments: Any) -> Any:
            is_here = self.root in (files.root, *files.root.parents)
            if self._is_full and is_here and self._needs_more(name, file, *arguments):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(files, file, *arguments)

        return call

    def _needs_more(self, name: str, file: Any, *arguments: Any) -> bool:
        if name.startswith("create"):
            return True
        nbytes = len(arguments[0]) if name == "overwrite" else arguments[0]
        # `st_blocks` counts allocated units of 512 bytes.
        return nbytes > 512 * os.fstat(file).st_blocks

    def fill(self) -> None:
        self._is_full = True

    def empty(self) -> None:
        self._is_full = False


@contextmanager
def small_disk(root: Path, nbytes: int) -> Iterator[MountedDisk | PretendedDisk]:
    """Yield a disk of `nbytes` bytes; simulated without the right to mount (no root, most containers)."""
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(root)]
    try:
        is_mounted = subprocess.run(mount, check=False, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        with pytest.MonkeyPatch.context() as patch:
            yield PretendedDisk(root, patch)
        return
    try:
        yield MountedDisk(root)
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True, timeout=60)
