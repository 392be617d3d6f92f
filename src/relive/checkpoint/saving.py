"""Writing a buffer: only what is new, and nothing old is touched before all of it is on the disk."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from relive.checkpoint.archive import Archive, FileInfo, Manifest, ManifestSummary
from relive.checkpoint.progress import show_progress
from relive.checkpoint.snapshot import KINDS, Rows, Snapshot, State
from relive.errors import CheckpointError, IncompatibleCheckpoint, explain
from relive.schema.checks import positive
from relive.storage.codec import Arrays, array_info, bytes_of
from relive.storage.files import Files

SEGMENT_BYTES = 1 << 30
"""Longer segments are split, so that rows which are overwritten soon do not keep others on the disk."""


@dataclass(frozen=True)
class Segment:
    """A file of rows that this process has written, or has read and verified."""

    file: FileInfo
    stop: torch.Tensor
    """The rows [N] that it ends before."""
    stamp: tuple[int, ...]
    """Its stamp at that time."""


@dataclass(frozen=True)
class PreviousSave:
    """The checkpoint of a folder that a save continues: this very buffer wrote it, or was loaded from it."""

    lineage: str
    number: int
    segments: list[Segment] = field(default_factory=list)
    saved: torch.Tensor | None = None
    """The first rows [N] that are not in them; None for all rows."""
    damaged: frozenset[int] = frozenset()
    """Newer checkpoints that were damaged when this one was loaded instead."""

    def without_newest_segments(self) -> PreviousSave:
        """Without its newest segments, as many as are one long one together: their rows are written again as one."""
        kept, nbytes = list(self.segments), 0
        while kept and nbytes + kept[-1].file.nbytes <= SEGMENT_BYTES:
            nbytes += kept.pop().file.nbytes
        return replace(self, segments=kept, saved=kept[-1].stop if kept else None)

    def without_rows(self) -> PreviousSave:
        """This lineage, with a next checkpoint that is written in full."""
        return replace(self, segments=[], saved=None)


_MAX_FOLDERS = 16
"""Folders that a buffer remembers: it may be saved into several in turn."""


def remember(buffer: Any, root: Path, previous: PreviousSave) -> None:
    """Let the next save of a buffer into a folder continue this checkpoint."""
    saves: dict[Path, PreviousSave] = vars(buffer).setdefault("_checkpoints", {})
    key = root.resolve()
    saves.pop(key, None)
    saves[key] = previous
    while len(saves) > _MAX_FOLDERS:
        del saves[next(iter(saves))]


def remember_damaged(buffer: Any, root: Path, damaged: Iterable[int]) -> None:
    """Let a buffer that was loaded in place of damaged checkpoints continue their lineage."""
    saves: dict[Path, PreviousSave] = buffer._checkpoints
    key = root.resolve()
    saves[key] = replace(saves[key], damaged=frozenset(damaged))


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
        kind = _kind_name(buffer)
        state = _with_note(Snapshot.of(buffer), note)
        rows = state.rows
        require = partial(_require_fields, f"save to {root}", kind, state.config)
        with archive.saving(state.nbytes, require) as summaries:
            previous = _previous_save(buffer, archive, summaries, damaged)
            number, lineage = archive.next_number(), previous.lineage
            is_joining = bool(summaries) and all(summary.lineage != lineage for summary in summaries.values())
            segments = [] if rows is None else _write_segments(archive, number, rows, previous)
            arrays = tuple(array_info(name, array) for name, array in state.arrays.items())
            file = archive.put("state", f"{number:08}.bin", arrays, map(bytes_of, state.arrays.values()))
            row_files = tuple(segment.file for segment in segments)
            manifest = Manifest(number, lineage, kind, state.config, state.values, file, row_files)
            try:
                archive.commit(manifest)
            finally:
                if archive.exists(number):  # also if the disk has refused only what comes after
                    remember(buffer, root, PreviousSave(lineage, number, segments, None if rows is None else rows.stop))
            archive.collect(keep, lineage, {**summaries, number: ManifestSummary(lineage, manifest.files)})
    for message in damaged:  # now: what a filter makes of a warning must not keep a buffer from being saved
        warnings.warn(
            f"save: a file that was saved before is damaged; all rows are written again. {message}", stacklevel=3
        )
    if is_joining:
        warnings.warn(
            f"save to {root}: checkpoints of another buffer are there, and stay; this one was written in full, and "
            f"keep={keep} counts only its own. Use a folder for each buffer; to continue a run, load its newest one.",
            stacklevel=3,
        )
    return number


def _with_note(state: Snapshot, note: tuple[dict[str, Any], Arrays] | None) -> Snapshot:
    """The snapshot with what the owner has to say; in format 1 only the name of the memory comes after it."""
    if note is None:
        return state
    last = {name: part for name, part in state.values.items() if name == "memory"}
    values = {name: part for name, part in state.values.items() if name not in last}
    noted = State.of_parts({"note": note})
    return Snapshot(state.config, values | noted.values | last, state.arrays | noted.arrays, state.rows)


def _previous_save(
    buffer: Any, archive: Archive, summaries: Mapping[int, ManifestSummary], damaged: list[str]
) -> PreviousSave:
    """The checkpoint to continue: this buffer's last one here, unless another buffer has continued that since."""
    previous: PreviousSave | None = getattr(buffer, "_checkpoints", {}).get(archive.root.resolve())
    if previous is None or _is_continued(previous, archive, summaries):
        return PreviousSave(secrets.token_hex(16), 0)
    if previous.number not in summaries or summaries[previous.number].lineage != previous.lineage:
        return previous.without_rows()
    try:
        archive.require_files(archive.manifest(previous.number))
    except CheckpointError:  # damaged since: everything is written again
        return previous.without_rows()
    return _verify_segments(
        archive, previous.without_newest_segments() if archive.is_long(previous.number) else previous, damaged
    )


def _is_continued(previous: PreviousSave, archive: Archive, summaries: Mapping[int, ManifestSummary]) -> bool:
    """Whether another buffer has saved in this lineage since, or may have: the disk did not give its manifest."""
    newer = (n for n in archive.numbers() if n > previous.number and n not in previous.damaged)
    return any(summaries[n].lineage == previous.lineage if n in summaries else not archive.is_damaged(n) for n in newer)


def _verify_segments(archive: Archive, previous: PreviousSave, damaged: list[str]) -> PreviousSave:
    """The previous with segments that are as they were written, each read again if its file may have changed since.

    Without any if one of them is `damaged`, which is told there.
    """
    segments = []
    for segment in previous.segments:
        try:
            stamp = archive.stamp(segment.file)
            if stamp != segment.stamp:
                archive.verify("segments", segment.file)
        except CheckpointError as error:
            damaged.append(str(error))
            return previous.without_rows()
        segments.append(replace(segment, stamp=stamp))
    return replace(previous, segments=segments)


def _write_segments(archive: Archive, number: int, rows: Rows, previous: PreviousSave) -> list[Segment]:
    """The segments that hold all rows: those of `previous` that are still needed, and new ones."""
    # A segment whose every row was overwritten is needed no more.
    kept = [one for one in previous.segments if bool((one.stop > rows.first).any())]
    new = rows if previous.saved is None else rows.since(previous.saved)
    for part, some in enumerate(_split(new)):
        pieces = show_progress(some.parts(), some.nbytes, "saving rows")
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


def _kind_name(buffer: Any) -> str:
    """The word for a buffer in files."""
    name = type(buffer).__name__
    if KINDS.get(name) is not type(buffer):
        remedy = "Save one of these; of an adapter, save its core."
        raise CheckpointError(explain("save", f"one of {', '.join(KINDS)}", name, remedy))
    return name


_FIELDS = ("obs", "action", "reward", "value", "extra")


def _declared_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The declarations in a config by name; a distillation buffer may have only its observation declared yet."""
    fields = config.get("fields", {name: config[name] for name in _FIELDS if name in config})
    return fields if isinstance(fields, dict) else {}


def _require_fields(where: str, kind: str, config: Mapping[str, Any], other: Manifest) -> None:
    """Raise an IncompatibleCheckpoint if a checkpoint is of another kind of buffer, or one with other fields."""
    remedy = "Save into another folder; nothing was changed in this one."
    if other.kind != kind:
        raise IncompatibleCheckpoint(explain(where, f"a {other.kind}, as in its checkpoints", f"a {kind}", remedy))
    own, found = _declared_fields(config), _declared_fields(other.config)
    names = own.keys() | found.keys() if "action" in own and "action" in found else own.keys() & found.keys()
    for name in sorted(names):
        if own.get(name) != found.get(name):
            expected = f"{name} {found.get(name)}, as in its checkpoints"
            raise IncompatibleCheckpoint(explain(where, expected, own.get(name), remedy))
