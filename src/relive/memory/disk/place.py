"""What `Memory.disk` names."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from relive import kernels
from relive.errors import SchemaError, explain
from relive.fields.schema import positive
from relive.memory.disk.folder import FORMAT, Folder
from relive.memory.disk.room import DiskRoom
from relive.memory.files import Files


@dataclass(frozen=True)
class Disk:
    """A folder for one replay buffer."""

    root: Path
    commit_every: int | None = None
    only_reads: bool = False
    """Whatever is written stays in this process: the files are left as they are."""

    @staticmethod
    def of(path: str | PathLike[str], commit_every: int | None) -> Disk:
        """The folder that arguments name."""
        if not isinstance(path, str | PathLike) or not os.fspath(path):
            raise SchemaError(explain("Memory.disk", "the path of a folder", repr(path), "Pass a str or a Path."))
        every = None if commit_every is None else positive("commit_every", commit_every)
        return Disk(Path(path).absolute(), every)

    @property
    def what_is_free(self) -> str:
        """The name of what `free_bytes` counts, for messages."""
        return f"the free space of the disk of {self.root}"

    def __repr__(self) -> str:
        every = "" if self.commit_every is None else f", commit_every={self.commit_every}"
        return f"Memory.disk({str(self.root)!r}{every})"

    def open(self, owner: Any) -> DiskRoom:
        """The folder, locked, with what was found there compared with the settings of the owner."""
        require_support(SchemaError)
        return DiskRoom(Folder(self.root, owner.config(), only_reads=self.only_reads), self.commit_every)

    def free_bytes(self) -> int | None:
        """What a new buffer may take; one that is there already has taken it."""
        return None if (self.root / FORMAT).exists() else Files(self.root).free_bytes()


def require_support(kind: type[Exception]) -> None:
    """Raise that kind of error where there cannot be disk memory."""
    got = sys.platform if sys.platform != "linux" else "no native core" if kernels.backend() == "torch" else ""
    if got:
        remedy = 'Keep the buffer in memory: device="cpu".'
        raise kind(explain("Memory.disk", "Linux and relive's native core", got, remedy))
