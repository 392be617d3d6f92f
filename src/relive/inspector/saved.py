"""Looking at saved buffers: no file is changed."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from relive.checkpoint.archive import Archive
from relive.checkpoint.loading import is_disk_memory, load
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
from relive.storage.commits import newest


def look(path: str | PathLike[str], *, number: int | None = None) -> Any:
    """The buffer that is saved below `path`, to be looked at: files stay as they are, also those of disk memory.

    For a sampler that only its maker can make again, one of ours stands in that its state fits.
    """
    root = Path(path).absolute()
    if is_disk_memory(root):
        return peek(root)
    refused: list[IncompatibleCheckpoint] = []
    for sampler in (None, *STAND_INS):
        try:
            return load(root, number=number, sampler=sampler)
        except IncompatibleCheckpoint as error:
            refused.append(error)
    raise refused[0]


def check(path: str | PathLike[str]) -> list[str]:
    """A sentence for each checkpoint below `path` that cannot be loaded; empty if all is well."""
    return [f"{number}: {wrong}" for number, wrong in examined(path) if wrong is not None]


def examined(path: str | PathLike[str]) -> Iterator[tuple[int, CheckpointError | None]]:
    """The checkpoints below `path`, oldest first, each read to its last byte, with what is wrong with it."""
    root = Path(path).absolute()
    if is_disk_memory(root):
        yield examined_disk(root)
        return
    archive = Archive(root)
    with archive.reading():
        if not archive.numbers():
            raise NoCheckpoint(explain(str(path), "at least 1 checkpoint", 0, "Save a buffer there first."))
        for number in archive.numbers():
            try:
                look(path, number=number)
            except CheckpointError as error:
                yield number, error
            else:
                yield number, None


def peek(path: str | PathLike[str]) -> ReplayBuffer:
    """The buffer in a folder that nobody has open, to be looked at: the files stay as they are.

    For a sampler that only its maker can make again, one of ours stands in that its files fit.
    """
    root = Path(path).absolute()
    try:
        return ReplayBuffer.from_disk(root, only_reads=True)
    except IncompatibleCheckpoint:
        sampler = Prioritized() if (root / "tree.leaves").exists() else Uniform()
        counted = (root / "sampler.drawn").exists()
        return ReplayBuffer.from_disk(root, sampler=Counted(sampler) if counted else sampler, only_reads=True)


def examined_disk(root: Path) -> tuple[int, CheckpointError | None]:
    """The number of the last commit, and what is wrong with the memory, every row of it read."""
    number = 0
    try:
        number = newest(root).number
        with peek(root) as replay:
            replay.check()
    except InvariantError as error:
        return number, CorruptCheckpoint(str(error))
    except CheckpointError as error:
        return number, error
    return number, None
