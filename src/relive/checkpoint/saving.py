"""Saves checkpoints: only new rows are written, and old files are removed after the new checkpoint is complete."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from relive.checkpoint.archive import Archive, FileInfo, Manifest, ManifestSummary
from relive.checkpoint.progress import show_progress
from relive.checkpoint.snapshot import BUFFER_CLASSES, Rows, Snapshot, State
from relive.errors import CheckpointError, IncompatibleCheckpoint, explain
from relive.schema.checks import check_positive_int
from relive.storage.codec import Arrays, describe_array, tensor_bytes
from relive.storage.files import FileOperations

SEGMENT_BYTES = 1 << 30
"""Maximum bytes of a segment, a file of rows. It stays on the disk as long as one of its rows is needed."""


@dataclass(frozen=True)
class Segment:
    """A segment that this process has written, or has read and verified."""

    file: FileInfo
    stop: torch.Tensor
    """Row [N] of each environment that follows its rows in the file."""
    stamp: tuple[int, ...]
    """`FileOperations.change_stamp` of the file when it was written or read."""


@dataclass(frozen=True)
class PreviousSave:
    """A checkpoint that the next save into its folder continues: the buffer was saved to it or loaded from it."""

    lineage: str
    number: int
    segments: list[Segment] = field(default_factory=list)
    saved_until: torch.Tensor | None = None
    """First unsaved row [N] of each environment; None if no segment exists."""
    damaged_numbers: frozenset[int] = frozenset()
    """Numbers of newer checkpoints that a load has skipped because they were damaged."""

    def without_newest_segments(self) -> PreviousSave:
        """Return a copy without the newest segments that together fit in one: the next save writes their rows again."""
        segments, nbytes = list(self.segments), 0
        while segments and nbytes + segments[-1].file.nbytes <= SEGMENT_BYTES:
            nbytes += segments.pop().file.nbytes
        return replace(self, segments=segments, saved_until=segments[-1].stop if segments else None)

    def without_rows(self) -> PreviousSave:
        """Return a copy without segments: the next save of this lineage writes all rows."""
        return replace(self, segments=[], saved_until=None)


_MAX_FOLDERS = 16
"""Maximum number of folders that a buffer remembers: it may be saved into several alternately."""


def remember_save(buffer: Any, root: Path, previous: PreviousSave) -> None:
    """Make the next save of a buffer into a folder continue this checkpoint."""
    saves: dict[Path, PreviousSave] = vars(buffer).setdefault("_checkpoints", {})
    key = root.resolve()
    saves.pop(key, None)
    saves[key] = previous
    while len(saves) > _MAX_FOLDERS:
        del saves[next(iter(saves))]


def save(
    buffer: Any,
    path: str | PathLike[str],
    *,
    keep: int = 2,
    files: type[FileOperations] = FileOperations,
    note: tuple[dict[str, Any], Arrays] | None = None,
) -> int:
    """Write a checkpoint of a buffer into the folder `path` and return its number; see `ReplayBuffer.save`.

    `note` is data of the caller, as JSON and arrays, that is saved with the buffer. `files` may be replaced in tests.
    """
    check_positive_int("keep", keep)
    root = Path(path).absolute()
    archive = Archive(root, files)
    messages: list[str] = []
    with buffer._lock, buffer._reading_in_order():
        kind = type(buffer).__name__
        if BUFFER_CLASSES.get(kind) is not type(buffer):
            remedy = "Save one of these; of an adapter, save its core."
            raise CheckpointError(explain("save", f"one of {', '.join(BUFFER_CLASSES)}", kind, remedy))
        state = _add_note(Snapshot.of(buffer), note)
        rows = state.rows
        check_newest = partial(_require_equal_fields, f"save to {root}", kind, state.config)
        with archive.lock_for_saving(state.nbytes, check_newest) as summaries:
            previous = _find_previous_save(buffer, archive, summaries, messages)
            number, lineage = archive.next_checkpoint_number(), previous.lineage
            has_other_lineages = bool(summaries) and all(summary.lineage != lineage for summary in summaries.values())
            segments = [] if rows is None else _write_segments(archive, number, rows, previous)
            arrays = tuple(describe_array(name, array) for name, array in state.arrays.items())
            file = archive.write_file("state", f"{number:08}.bin", arrays, map(tensor_bytes, state.arrays.values()))
            row_files = tuple(segment.file for segment in segments)
            manifest = Manifest(number, lineage, kind, state.config, state.values, file, row_files)
            try:
                archive.commit_manifest(manifest)
            finally:
                # An interrupted `commit_manifest` may have written the manifest: the checkpoint then exists, and the
                # next save continues it.
                if archive.has_manifest(number):
                    saved_until = None if rows is None else rows.stop
                    remember_save(buffer, root, PreviousSave(lineage, number, segments, saved_until))
            summary = ManifestSummary(lineage, manifest.file_sizes)
            archive.remove_old_checkpoints(keep, lineage, {**summaries, number: summary})
    # Warnings come after the save because a filter may turn them into errors.
    for message in messages:
        warnings.warn(
            f"save: a file that was saved before is damaged; all rows are written again. {message}", stacklevel=3
        )
    if has_other_lineages:
        warnings.warn(
            f"save to {root}: checkpoints of another buffer are there, and stay; this one was written in full, and "
            f"keep={keep} counts only its own. Use a folder for each buffer. After load(number=…) this is expected: "
            "delete the later checkpoints if you do not need them.",
            stacklevel=3,
        )
    return number


def _add_note(state: Snapshot, note: tuple[dict[str, Any], Arrays] | None) -> Snapshot:
    """Add a note to a snapshot."""
    if note is None:
        return state
    note_state = State.of_parts({"note": note})
    values = state.values | note_state.values
    if "memory" in values:
        # Format 1 stores the name of the memory as the last entry of the values.
        values["memory"] = values.pop("memory")
    return state._replace(values=values, arrays=state.arrays | note_state.arrays)


def _find_previous_save(
    buffer: Any, archive: Archive, summaries: Mapping[int, ManifestSummary], messages: list[str]
) -> PreviousSave:
    """Return the checkpoint to continue: the last one of this buffer, unless another buffer has continued it.

    If one of its segments is damaged now, a message is appended to `messages`.
    """
    previous: PreviousSave | None = getattr(buffer, "_checkpoints", {}).get(archive.root.resolve())
    if previous is None or _has_successor(previous, archive, summaries):
        return PreviousSave(secrets.token_hex(16), 0)
    if previous.number not in summaries or summaries[previous.number].lineage != previous.lineage:
        return previous.without_rows()
    try:
        archive.require_files(summaries[previous.number].file_sizes)
    except CheckpointError:
        return previous.without_rows()
    if archive.has_long_manifest(previous.number):
        previous = previous.without_newest_segments()
    segments = []
    for segment in previous.segments:
        try:
            stamp = archive.read_segment_stamp(segment.file)
            if stamp != segment.stamp:
                archive.verify_segment(segment.file)
        except CheckpointError as error:
            messages.append(str(error))
            return previous.without_rows()
        segments.append(replace(segment, stamp=stamp))
    return replace(previous, segments=segments)


def _has_successor(previous: PreviousSave, archive: Archive, summaries: Mapping[int, ManifestSummary]) -> bool:
    """Whether another buffer may have continued this checkpoint, perhaps with a manifest that cannot be read now."""
    newer = (n for n in archive.checkpoint_numbers() if n > previous.number and n not in previous.damaged_numbers)
    return any(summaries[n].lineage == previous.lineage if n in summaries else not archive.is_damaged(n) for n in newer)


def _write_segments(archive: Archive, number: int, rows: Rows, previous: PreviousSave) -> list[Segment]:
    """Write the rows that no segment of `previous` contains; return the segments of all stored rows, oldest first."""
    segments = [segment for segment in previous.segments if bool((segment.stop > rows.first).any())]
    first = rows.first
    if previous.saved_until is not None:
        first = torch.minimum(torch.maximum(first, previous.saved_until), rows.stop)
    for i, part in enumerate(_split_rows(Rows(rows.columns, first, rows.stop))):
        pieces = show_progress(part.iter_bytes(), part.nbytes, "saving rows")
        file = archive.write_file("segments", f"{number:08}-{i}.bin", part.segment_arrays, pieces)
        segments.append(Segment(file, part.stop, archive.read_segment_stamp(file)))
    return segments


def _split_rows(rows: Rows) -> Iterator[Rows]:
    """Split rows into ranges of at most about `SEGMENT_BYTES` bytes, oldest first."""
    if not len(rows):
        return
    max_rows = int((rows.stop - rows.first).max())
    num_parts = max(-(-rows.nbytes // SEGMENT_BYTES), 1)
    step = -(-max_rows // num_parts)
    for start in range(0, max_rows, step):
        first = torch.minimum(rows.first + start, rows.stop)
        yield Rows(rows.columns, first, torch.minimum(first + step, rows.stop))


_FIELD_NAMES = ("obs", "action", "reward", "value", "extra")


def _require_equal_fields(where: str, kind: str, config: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise an IncompatibleCheckpoint if a checkpoint has another class of buffer, or other fields."""
    remedy = "Save into another folder; nothing was changed in this one."
    if manifest.kind != kind:
        raise IncompatibleCheckpoint(explain(where, f"a {manifest.kind}, as in its checkpoints", f"a {kind}", remedy))
    fields, other_fields = _read_declared_fields(config), _read_declared_fields(manifest.config)
    names = fields.keys() | other_fields.keys()
    if "action" not in fields or "action" not in other_fields:
        # An empty distillation buffer has declared only `obs`, so only the fields that both have are compared.
        names = fields.keys() & other_fields.keys()
    for name in sorted(names):
        if fields.get(name) != other_fields.get(name):
            expected = f"{name} {other_fields.get(name)}, as in its checkpoints"
            raise IncompatibleCheckpoint(explain(where, expected, fields.get(name), remedy))


def _read_declared_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = config.get("fields", {name: config[name] for name in _FIELD_NAMES if name in config})
    return fields if isinstance(fields, dict) else {}
