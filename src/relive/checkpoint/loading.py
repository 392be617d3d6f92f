"""Loading: the newest valid checkpoint below a folder, or the one that is asked for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from relive.checkpoint.archive import Archive
from relive.checkpoint.manifest import manifest_file
from relive.checkpoint.reopening import examined_disk, is_disk_memory, peek, reopened, stand_ins
from relive.checkpoint.restoring import Accept, restored
from relive.checkpoint.savable import require_class
from relive.checkpoint.saving import pass_over
from relive.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, NoCheckpoint, explain
from relive.replay.samplers import Sampler
from relive.storage import Memory
from relive.storage.files import Files
from relive.storage.snapshot import named

if TYPE_CHECKING:
    from relive.distillation import DistillationBuffer
    from relive.replay.buffer import ReplayBuffer
    from relive.rollout.buffer import RolloutBuffer

Buffer = TypeVar("Buffer", "ReplayBuffer", "RolloutBuffer", "DistillationBuffer")


@overload
def load(
    path: str | PathLike[str],
    kind: None = None,
    *,
    number: int | None = None,
    device: torch.device | str | Memory | None = None,
    sampler: Sampler | None = None,
    files: type[Files] = Files,
) -> ReplayBuffer | RolloutBuffer | DistillationBuffer: ...


@overload
def load(
    path: str | PathLike[str],
    kind: type[Buffer],
    *,
    number: int | None = None,
    device: torch.device | str | Memory | None = None,
    sampler: Sampler | None = None,
    files: type[Files] = Files,
) -> Buffer: ...


def load(
    path: str | PathLike[str],
    kind: Any = None,
    *,
    number: int | None = None,
    device: torch.device | str | Memory | None = None,
    sampler: Sampler | None = None,
    files: type[Files] = Files,
) -> Any:
    """The buffer that was saved below `path`: the newest valid checkpoint, or the one called `number`.

    It goes on exactly as the saved one would have: the same draws, the same epochs, the same statistics. Where
    `device` changes it, a warning says how.

    Where `path` is the folder of a buffer in disk memory, that buffer is reopened; nothing of it can be changed then.

    A damaged checkpoint is passed over for an older one with a warning, unless it was named. CorruptCheckpoint,
    IncompatibleCheckpoint and NoCheckpoint say what is wrong and where. Nothing in a checkpoint is executed.

    Args:
        path: the folder that `save` was given, or that of a buffer in disk memory.
        kind: the buffer class that is expected there; any other is an IncompatibleCheckpoint. None takes any.
        number: which checkpoint, as `save` returned it; None takes the newest valid one.
        device: where to load it: a torch device, or a `Memory`; None is where it was.
        sampler: needed where the saved one was the caller's own, or had a function for `beta`.
        files: how files are read; for tests that make disks fail.
    """
    return found(Path(path).absolute(), kind, number, {"device": device, "sampler": sampler}, files=files)


def found(
    root: Path,
    kind: type | None,
    number: int | None,
    options: dict[str, Any],
    *,
    files: type[Files] = Files,
    accept: Accept | None = None,
) -> Any:
    """See `load`; a checkpoint that `accept` calls corrupt is passed over as a damaged one is."""
    if is_disk_memory(root):
        require_class(str(root), kind, "ReplayBuffer")
        return reopened(root, {"number": number, **options})
    archive = Archive(root, files)
    with archive.reading():
        if number is not None:
            return _loaded(archive, number, kind, options, accept)
        damaged: dict[int, str] = {}  # no errors, whose tracebacks would keep all that was read
        for candidate in _worth_trying(archive):
            try:
                buffer = _loaded(archive, candidate, kind, options, accept)
            except CorruptCheckpoint as error:
                damaged[candidate] = str(error)
                continue
            pass_over(buffer, root, damaged)
            for wrong in damaged.values():
                warnings.warn(
                    f"load: skipped a damaged checkpoint and loaded number {candidate}. {wrong}", stacklevel=3
                )
            return buffer
    if damaged:
        raise CorruptCheckpoint(next(iter(damaged.values())))
    raise NoCheckpoint(explain(str(root), "at least 1 checkpoint", 0, "Save a buffer there first."))


_MOST_TRIED, _TRIED_ANYHOW, _PATIENCE, _MOST_READ = 64, 8, 60.0, 1 << 24
"""Checkpoints, checkpoints, seconds, and bytes of manifests."""


def _worth_trying(archive: Archive) -> Iterator[int]:
    """The newest checkpoints, the newest first: bounded in number, and after the first few in time and in bytes."""
    began, nbytes = time.monotonic(), 0
    for i, number in enumerate(archive.numbers()[: -_MOST_TRIED - 1 : -1]):
        nbytes += archive.size(number)
        if i >= _TRIED_ANYHOW and (time.monotonic() - began > _PATIENCE or nbytes > _MOST_READ):
            return
        yield number


def _loaded(archive: Archive, number: int, kind: type | None, options: dict[str, Any], accept: Accept | None) -> Any:
    with named(manifest_file(number)):
        manifest = archive.manifest(number)
        require_class(str(archive.root), kind, manifest.kind)
        return restored(archive, manifest, options, accept)


def look(path: str | PathLike[str], *, number: int | None = None) -> Any:
    """The buffer that is saved below `path`, to be looked at: files stay as they are, also those of disk memory.

    For a sampler that only its maker can make again, one of ours stands in that its state fits.
    """
    root = Path(path).absolute()
    if is_disk_memory(root):
        return peek(root)
    refused: list[IncompatibleCheckpoint] = []
    for sampler in (None, *stand_ins()):
        try:
            return load(root, number=number, sampler=sampler)
        except IncompatibleCheckpoint as error:
            refused.append(error)
    raise refused[0]


def check(path: str | PathLike[str]) -> list[str]:
    """What is wrong below `path`, a sentence for each checkpoint that cannot be loaded; empty if all is well."""
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
