"""Writing a buffer: only what is new, and nothing old is touched before all of it is on the disk."""

from __future__ import annotations

import secrets
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from relive.checkpoint import kinds
from relive.checkpoint.contents import Arrays, Contents, Rows, array_of, bytes_of
from relive.checkpoint.manifest import File, Manifest
from relive.checkpoint.progress import watched
from relive.checkpoint.vault import Vault
from relive.errors import CheckpointError
from relive.fields.schema import positive
from relive.memory.files import Files, Stamp

SEGMENT_BYTES = 1 << 30
"""Longer segments are split, so that rows which are overwritten soon do not keep others on the disk."""


class Segment(NamedTuple):
    """A file of rows that this process has written, or read and found right."""

    file: File
    stop: torch.Tensor
    """The rows [N] that it ends before."""
    stamp: Stamp
    """What the system said of it then."""


@dataclass(frozen=True)
class Base:
    """What a save goes on from: the checkpoint that this very buffer wrote, or was loaded from."""

    root: Path
    lineage: str
    number: int
    segments: list[Segment]
    saved: torch.Tensor | None
    """The first rows [N] that are not in them; None for all rows."""

    def shorter(self) -> Base:
        """Without its newest segments, as many as are one long one together: their rows are written again as one."""
        kept, nbytes = list(self.segments), 0
        while kept and nbytes + kept[-1].file.nbytes <= SEGMENT_BYTES:
            nbytes += kept.pop().file.nbytes
        return replace(self, segments=kept, saved=kept[-1].stop if kept else None)


def save(
    buffer: Any,
    path: str | PathLike[str],
    *,
    keep: int = 2,
    files: type[Files] = Files,
    note: tuple[dict[str, Any], Arrays] | None = None,
) -> int:
    """Write a checkpoint of a buffer below `path` and return its number; see `ReplayBuffer.save`.

    `note` is what the buffer's owner has to say about just this state of it: JSON and arrays, in the same checkpoint.
    """
    positive("keep", keep)
    root = Path(path).absolute()
    vault = Vault(root, files)
    with buffer._lock, getattr(buffer, "_in_order", nullcontext)():
        contents = kinds.of(buffer).contents(buffer)
        if note is not None:
            contents.take("note", note)
        if contents.kind == "ReplayBuffer":
            contents.take("memory", ({"name": buffer.storage.memory.room.name}, {}))
        with vault.opened(_nbytes(contents)):
            base = _base(buffer, vault, root)
            manifest, segments = _written(vault, contents, base)
            vault.commit(manifest)
            saved = None if contents.rows is None else contents.rows.stop
            buffer._checkpoint = Base(root, manifest.lineage, manifest.number, segments, saved)
            vault.collect(keep)
    return manifest.number


def _nbytes(contents: Contents) -> int:
    state = sum(array.numel() * array.element_size() for array in contents.arrays.values())
    return state + (0 if contents.rows is None else contents.rows.nbytes)


def _base(buffer: Any, vault: Vault, root: Path) -> Base | None:
    """The newest checkpoint here, if it is this buffer's own."""
    base = getattr(buffer, "_checkpoint", None)
    numbers = vault.numbers()
    if base is None or base.root != root or not numbers or numbers[-1] != base.number:
        return None
    try:
        manifest = vault.manifest(base.number)
        vault.require_files(manifest)
    except CheckpointError:  # damaged since: everything is written again
        return None
    if manifest.lineage != base.lineage:
        return None
    return _verified(vault, base.shorter() if vault.is_long(base.number) else base)


def _verified(vault: Vault, base: Base) -> Base | None:
    """The same with segments that are as they were written, each read again if its file may have changed since."""
    segments = []
    for segment in base.segments:
        try:
            stamp = vault.stamp(segment.file)
            if stamp != segment.stamp:
                deque(vault.read("segments", segment.file), 0)
        except CheckpointError as error:
            warnings.warn(
                f"save: a file that was saved before is damaged; all rows are written again. {error}", stacklevel=5
            )
            return None
        segments.append(segment._replace(stamp=stamp))
    return replace(base, segments=segments)


def _written(vault: Vault, contents: Contents, base: Base | None) -> tuple[Manifest, list[Segment]]:
    number = vault.next_number()
    segments = [] if base is None else base.segments
    if contents.rows is not None:
        # A segment whose every row was overwritten is needed no more.
        segments = [segment for segment in segments if bool((segment.stop > contents.rows.first).any())]
        fresh = contents.rows if base is None or base.saved is None else contents.rows.since(base.saved)
        for part, rows in enumerate(_split(fresh)):
            parts = watched(rows.parts(), rows.nbytes, "saving rows")
            file = vault.put("segments", f"{number:08}-{part}.bin", rows.arrays, parts)
            segments = [*segments, Segment(file, rows.stop, vault.stamp(file))]
    arrays = tuple(array_of(name, array) for name, array in contents.arrays.items())
    state = vault.put("state", f"{number:08}.bin", arrays, map(bytes_of, contents.arrays.values()))
    lineage = secrets.token_hex(16) if base is None else base.lineage
    files = tuple(segment.file for segment in segments)
    return Manifest(number, lineage, contents.kind, contents.config, contents.values, state, files), segments


def _split(rows: Rows) -> Iterator[Rows]:
    """The rows in segments of a bounded size, oldest first."""
    if not len(rows):
        return
    longest = int((rows.stop - rows.first).max())
    pieces = max(-(-rows.nbytes // SEGMENT_BYTES), 1)
    step = -(-longest // pieces)
    for start in range(0, longest, step):
        first = torch.minimum(rows.first + start, rows.stop)
        yield Rows(rows.columns, first, torch.minimum(first + step, rows.stop))
