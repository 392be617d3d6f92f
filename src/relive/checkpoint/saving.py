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
from typing import Any

import torch

from relive.checkpoint.archive import Archive
from relive.checkpoint.manifest import Manifest
from relive.checkpoint.progress import watched
from relive.checkpoint.savable import name_of
from relive.checkpoint.segments import Segment
from relive.errors import CheckpointError
from relive.fields.schema import positive
from relive.memory.files import Files
from relive.memory.rows import Rows
from relive.memory.saved import Arrays, State, array_of, bytes_of, nbytes_of

SEGMENT_BYTES = 1 << 30
"""Longer segments are split, so that rows which are overwritten soon do not keep others on the disk."""


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
    archive = Archive(root, files)
    damaged: list[str] = []
    with buffer._lock, getattr(buffer, "_in_order", nullcontext)():
        kind = name_of(buffer)
        state, rows = _with_note(buffer.state(), note), buffer.rows()
        with archive.opened(nbytes_of(state.arrays) + (0 if rows is None else rows.nbytes)):
            base = _base(buffer, archive, root, damaged)
            number, lineage = archive.next_number(), secrets.token_hex(16) if base is None else base.lineage
            segments = [] if rows is None else _written(archive, number, rows, base)
            arrays = tuple(array_of(name, array) for name, array in state.arrays.items())
            file = archive.put("state", f"{number:08}.bin", arrays, map(bytes_of, state.arrays.values()))
            files_of_rows = tuple(segment.file for segment in segments)
            archive.commit(Manifest(number, lineage, kind, buffer.config(), state.values, file, files_of_rows))
            buffer._checkpoint = Base(root, lineage, number, segments, None if rows is None else rows.stop)
            archive.collect(keep)
    for wrong in damaged:  # now: what a filter makes of a warning must not keep a buffer from being saved
        warnings.warn(
            f"save: a file that was saved before is damaged; all rows are written again. {wrong}", stacklevel=3
        )
    return number


def _with_note(state: State, note: tuple[dict[str, Any], Arrays] | None) -> State:
    """The state with what the owner has to say; in format 1 only the name of the memory comes after it."""
    if note is None:
        return state
    last = {name: part for name, part in state.values.items() if name == "memory"}
    values = {name: part for name, part in state.values.items() if name not in last}
    noted = State.of_parts({"note": note})
    return State(values | noted.values | last, state.arrays | noted.arrays)


def _base(buffer: Any, archive: Archive, root: Path, damaged: list[str]) -> Base | None:
    """The newest checkpoint here, if it is this buffer's own."""
    base = getattr(buffer, "_checkpoint", None)
    numbers = archive.numbers()
    if base is None or base.root != root or not numbers or numbers[-1] != base.number:
        return None
    try:
        manifest = archive.manifest(base.number)
        archive.require_files(manifest)
    except CheckpointError:  # damaged since: everything is written again
        return None
    if manifest.lineage != base.lineage:
        return None
    return _verified(archive, base.shorter() if archive.is_long(base.number) else base, damaged)


def _verified(archive: Archive, base: Base, damaged: list[str]) -> Base | None:
    """The same with segments that are as they were written, each read again if its file may have changed since.

    None if one of them is `damaged`, which is told there.
    """
    segments = []
    for segment in base.segments:
        try:
            stamp = archive.stamp(segment.file)
            if stamp != segment.stamp:
                deque(archive.read("segments", segment.file), 0)
        except CheckpointError as error:
            damaged.append(str(error))
            return None
        segments.append(segment._replace(stamp=stamp))
    return replace(base, segments=segments)


def _written(archive: Archive, number: int, rows: Rows, base: Base | None) -> list[Segment]:
    """The segments that hold all rows: those of `base` that are still needed, and new ones."""
    # A segment whose every row was overwritten is needed no more.
    kept = [] if base is None else [one for one in base.segments if bool((one.stop > rows.first).any())]
    new = rows if base is None or base.saved is None else rows.since(base.saved)
    for part, some in enumerate(_split(new)):
        pieces = watched(some.parts(), some.nbytes, "saving rows")
        file = archive.put("segments", f"{number:08}-{part}.bin", some.arrays, pieces)
        kept.append(Segment(file, some.stop, archive.stamp(file)))
    return kept


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
