"""Read-only access to saved buffers."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from relive.checkpoint.archive import Archive
from relive.checkpoint.loading import load
from relive.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvariantError,
    NoCheckpoint,
    explain,
)  # fmt: skip
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Counted, Prioritized, Uniform
from relive.replay.samplers.registry import STAND_INS
from relive.storage.disk import is_disk_memory, read_newest_commit


def load_read_only(path: str | PathLike[str], *, number: int | None = None) -> Any:
    """Load the buffer saved in the folder `path`, from a checkpoint or disk memory, without changing any file.

    A custom sampler cannot be rebuilt from the file; a standard sampler with the same kind of state replaces it.
    """
    root = Path(path).absolute()
    if is_disk_memory(root):
        return peek(root)
    errors: list[IncompatibleCheckpoint] = []
    for sampler in (None, *STAND_INS):
        try:
            return load(root, number=number, sampler=sampler)
        except IncompatibleCheckpoint as error:
            errors.append(error)
    raise errors[0]


def peek(path: str | PathLike[str]) -> ReplayBuffer:
    """Open the disk memory in a folder, which no process may have open, without changing any file.

    A custom sampler cannot be rebuilt from the files; a standard sampler with the same files replaces it.
    """
    root = Path(path).absolute()
    try:
        return ReplayBuffer.from_disk(root, only_reads=True)
    except IncompatibleCheckpoint:
        sampler = Prioritized() if (root / "tree.leaves").exists() else Uniform()
        has_counts = (root / "sampler.drawn").exists()
        return ReplayBuffer.from_disk(root, sampler=Counted(sampler) if has_counts else sampler, only_reads=True)


def verify(path: str | PathLike[str]) -> Iterator[tuple[int, CheckpointError | None]]:
    """Read all bytes of each checkpoint below `path`, or of disk memory; yields (number, error or None).

    Checkpoints come oldest first; the number of disk memory is the number of its last commit.
    """
    root = Path(path).absolute()
    if is_disk_memory(root):
        number, error = 0, None
        try:
            number = read_newest_commit(root).number
            with peek(root) as replay:
                replay.check()
        except InvariantError as exception:
            error = CorruptCheckpoint(str(exception))
        except CheckpointError as exception:
            error = exception
        yield number, error
        return
    archive = Archive(root)
    with archive.lock_for_loading():
        if not archive.checkpoint_numbers():
            raise NoCheckpoint(explain(str(path), "at least 1 checkpoint", 0, "Save a buffer there first."))
        for number in archive.checkpoint_numbers():
            error = None
            try:
                load_read_only(path, number=number)
            except CheckpointError as exception:
                error = exception
            yield number, error
