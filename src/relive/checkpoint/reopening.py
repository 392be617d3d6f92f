"""Disk memory without its settings: reopened, looked at, or examined."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from relive.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvariantError,
    SchemaError,
    explain,
)
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Counted, Prioritized, Sampler, Uniform
from relive.replay.settings import arguments_of
from relive.storage.commits import newest
from relive.storage.disk import disk_memory, is_made, require_support
from relive.storage.files import Files


def is_disk_memory(root: Path) -> bool:
    """Whether a folder says so of itself."""
    try:
        return is_made(Files(root))
    except CorruptCheckpoint:
        return False


def reopened(root: Path, options: dict[str, Any], *, only_reads: bool = False) -> ReplayBuffer:
    """The buffer in a folder, made with the settings that its last commit names; of options only a sampler is taken."""
    changes = [name for name, value in options.items() if value is not None and name != "sampler"]
    if changes:
        remedy = "Save the buffer, and load that checkpoint with this argument."
        got = f"{changes[0]}={options[changes[0]]!r}"
        raise IncompatibleCheckpoint(explain(f"load {root}", "no changes to disk memory", got, remedy))
    require_support(IncompatibleCheckpoint)
    record = newest(root)
    memory = disk_memory(root, only_reads=only_reads)
    try:
        changes = {"device": memory, "sampler": options.get("sampler")}
        return ReplayBuffer(**arguments_of(record.saved.config, record.saved, changes))
    except SchemaError as error:
        raise CorruptCheckpoint(f"{record.name}: the description of the buffer is invalid. {error}") from error


def peek(path: str | PathLike[str]) -> ReplayBuffer:
    """The buffer in a folder that nobody has open, to be looked at: the files stay as they are.

    For a sampler that only its maker can make again, one of ours stands in that its files fit.
    """
    root = Path(path).absolute()
    try:
        return reopened(root, {}, only_reads=True)
    except IncompatibleCheckpoint:
        sampler = Prioritized() if (root / "tree.leaves").exists() else Uniform()
        counted = (root / "sampler.drawn").exists()
        return reopened(root, {"sampler": Counted(sampler) if counted else sampler}, only_reads=True)


def stand_ins() -> list[Sampler]:
    """Samplers of every state that ours can have, for one that only its maker can make again."""
    return [Prioritized(), Counted(Prioritized()), Uniform(), Counted(Uniform())]


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
