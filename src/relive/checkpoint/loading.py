"""Loading: the newest valid checkpoint of a folder, a given checkpoint, or disk memory.

Structure and sizes are verified before memory is allocated.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from relive import lazy
from relive.checkpoint.archive import Archive, FileInfo, Manifest, SegmentReader, manifest_file_name
from relive.checkpoint.progress import show_progress
from relive.checkpoint.saving import PreviousSave, Segment, remember_save
from relive.checkpoint.snapshot import BUFFER_CLASSES, MAX_NOTE_BYTES, Rows
from relive.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvariantError,
    NoCheckpoint,
    SchemaError,
    explain,
)  # fmt: skip
from relive.schema.checks import check_device_available, check_positive_int
from relive.schema.conversion import as_indexable
from relive.storage import Memory
from relive.storage.allocator import request_large_pages
from relive.storage.codec import JsonNode, SnapshotReader, describe_array, require_bool_bytes, writable_memory
from relive.storage.disk import is_disk_memory
from relive.storage.files import FileOperations, is_read_error

if TYPE_CHECKING:
    from relive.distillation import DistillationBuffer
    from relive.replay.buffer import ReplayBuffer
    from relive.rollout.buffer import RolloutBuffer

Buffer = TypeVar("Buffer", "ReplayBuffer", "RolloutBuffer", "DistillationBuffer")


@overload
def load(
    path: str | PathLike[str], kind: None = None, *, number: int | None = None,
    device: torch.device | str | Memory | None = None, sampler: lazy.Sampler | None = None,
    files: type[FileOperations] = FileOperations,
) -> ReplayBuffer | RolloutBuffer | DistillationBuffer: ...  # fmt: skip


@overload
def load(
    path: str | PathLike[str], kind: type[Buffer], *, number: int | None = None,
    device: torch.device | str | Memory | None = None, sampler: lazy.Sampler | None = None,
    files: type[FileOperations] = FileOperations,
) -> Buffer: ...  # fmt: skip


def load(
    path: str | PathLike[str], kind: Any = None, *, number: int | None = None,
    device: torch.device | str | Memory | None = None, sampler: lazy.Sampler | None = None,
    files: type[FileOperations] = FileOperations,
) -> Any:  # fmt: skip
    """Load the buffer saved in the folder `path`: the newest valid checkpoint, or the checkpoint `number`.

    The loaded buffer continues exactly like the saved one: the same draws, the same epochs, the same statistics. If
    `device` prevents that, a warning names the difference.

    If `path` is the folder of a buffer in disk memory, that buffer is reopened, and only `sampler` may be passed.

    A damaged checkpoint is skipped with a warning and an older one loaded, unless `number` is given. The errors
    CorruptCheckpoint, IncompatibleCheckpoint and NoCheckpoint name the fault and its place. Loading never executes code
    from a checkpoint.

    Args:
        path: the folder that was passed to `save`, or the folder of a buffer in disk memory.
        kind: expected class of the buffer; another class raises an IncompatibleCheckpoint. None accepts all.
        number: number of the checkpoint, as returned by `save`; None loads the newest valid one.
        device: torch device or `Memory` to load to; None for that of the saved buffer.
        sampler: required if the saved sampler was a custom one, or had a function for `beta`. Other exponents of a
            `Prioritized` apply to the stored priorities.
        files: class that reads files; for tests that simulate failing disks.
    """
    if kind is not None and not isinstance(kind, type):
        raise SchemaError(explain("kind", "a class of buffers", repr(kind), "Pass rl.ReplayBuffer, or leave it out."))
    if number is not None:
        number = check_positive_int("number", number)
    return load_folder(Path(path).absolute(), kind, number, {"device": device, "sampler": sampler}, files=files)


def load_folder(
    root: Path,
    kind: type | None,
    number: int | None,
    options: dict[str, Any],
    *,
    files: type[FileOperations] = FileOperations,
    check_buffer: Callable[[Any, SnapshotReader], None] | None = None,
) -> Any:
    """Load a buffer with `options` (device and sampler, which may be None); see `load`.

    `check_buffer(buffer, saved)` may raise a CorruptCheckpoint, to try an older checkpoint.
    """
    if is_disk_memory(root):
        _require_class(str(root), kind, "ReplayBuffer")
        for name, value in {"number": number, "device": options["device"]}.items():
            if value is not None:
                remedy = "Save the buffer, and load that checkpoint with this argument."
                expected, got = "no changes to disk memory", f"{name}={value!r}"
                raise IncompatibleCheckpoint(explain(f"load {root}", expected, got, remedy))
        return BUFFER_CLASSES["ReplayBuffer"].from_disk(root, sampler=options["sampler"])
    archive = Archive(root, files)
    with archive.lock_for_loading():
        if number is not None:
            return _load_checkpoint(archive, number, kind, options, check_buffer)
        # Messages are collected instead of errors, whose tracebacks would keep loaded data alive.
        messages: list[str] = []
        damaged_numbers: set[int] = set()
        for candidate in _iter_candidates(archive):
            try:
                buffer = _load_checkpoint(archive, candidate, kind, options, check_buffer, frozenset(damaged_numbers))
            except CorruptCheckpoint as error:
                messages.append(str(error))
                if not is_read_error(error):
                    damaged_numbers.add(candidate)
                continue
            for message in messages:
                text = f"load: skipped a damaged checkpoint and loaded number {candidate}. {message}"
                warnings.warn(text, stacklevel=3)
            return buffer
    if messages:
        raise CorruptCheckpoint(messages[0])
    raise NoCheckpoint(explain(str(root), "at least 1 checkpoint", 0, "Save a buffer there first."))


_MAX_CANDIDATES, _MIN_CANDIDATES, _MAX_SECONDS, _MAX_MANIFEST_BYTES = 64, 8, 60.0, 1 << 24
"""Limits of a search for a valid checkpoint: at most 64 are tried; after 8, also 60 seconds and 16 MiB of manifests."""


def _iter_candidates(archive: Archive) -> Iterator[int]:
    """Yield the numbers of checkpoints to try, newest first, within the limits of a search."""
    start, nbytes = time.monotonic(), 0
    for i, number in enumerate(archive.checkpoint_numbers()[: -_MAX_CANDIDATES - 1 : -1]):
        nbytes += archive.manifest_size(number)
        if i >= _MIN_CANDIDATES and (time.monotonic() - start > _MAX_SECONDS or nbytes > _MAX_MANIFEST_BYTES):
            return
        yield number


def _load_checkpoint(
    archive: Archive, number: int, kind: type | None, options: dict[str, Any], check_buffer: Callable[..., None] | None,
    damaged_numbers: frozenset[int] = frozenset(),
) -> Any:  # fmt: skip
    """Load one checkpoint; `options` (device, sampler) that are not None override its settings, with warnings.

    The next save of the buffer ignores the newer checkpoints `damaged_numbers`.
    """
    where = manifest_file_name(number)
    with _prefix_file_name(where):
        manifest = archive.read_manifest(number)
        _require_class(str(archive.root), kind, manifest.kind)
        archive.require_files(manifest.file_sizes)
        if manifest.kind not in BUFFER_CLASSES:
            remedy = "Load it with the version of relive that saved it."
            raise IncompatibleCheckpoint(explain(where, f"one of {', '.join(BUFFER_CLASSES)}", manifest.kind, remedy))
        saved = archive.read_state(manifest)
        saved.segments = {f"segments/{segment.name}": segment.arrays for segment in manifest.segments}
        if options["device"] is not None:
            check_device_available(Memory.of(options["device"]).device, IncompatibleCheckpoint)
        try:
            buffer, segments = _make_buffer(archive, manifest, saved, options)
            if check_buffer is not None:
                check_buffer(buffer, saved)
        except MemoryError as error:
            text = f"{where}: the buffer does not fit into the memory of this machine. {error}"
            raise IncompatibleCheckpoint(text) from error
        except SchemaError as error:
            # A SchemaError means here that the constructor of the buffer has refused the saved config.
            raise CorruptCheckpoint(f"{where}: the description of the buffer is invalid. {error}") from error
        except InvariantError as error:
            # An InvariantError means here that `check()` of the buffer has refused the saved state.
            raise CorruptCheckpoint(f"state/{manifest.state.name}: the contents are invalid. {error}") from error
        previous, rows = PreviousSave(manifest.lineage, number, damaged_numbers=damaged_numbers), buffer.rows()
        # With another config the rows may be in other slots, so the next save writes all rows.
        if rows is not None and buffer.config() == manifest.config:
            previous = replace(previous, segments=segments, saved_until=rows.stop)
        remember_save(buffer, archive.root, previous)
        if options["device"] is not None:
            for change in _describe_changes(manifest, buffer):
                warnings.warn(f"load: {change}", stacklevel=4)
        return buffer


@contextmanager
def _prefix_file_name(file: str) -> Iterator[None]:
    """Prefix the name of a file to errors of the body that do not contain it."""
    try:
        yield
    except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
        if file.rpartition("/")[2].partition(".")[0] in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error.__cause__


def _make_buffer(
    archive: Archive, manifest: Manifest, saved: SnapshotReader, options: dict[str, Any]
) -> tuple[Any, list[Segment]]:
    """Make a buffer, restore and check its state and rows, and return it with the segments of the rows."""
    buffer = BUFFER_CLASSES[manifest.kind].from_config(saved.config, saved, **options)
    saved.is_moved = str(buffer.device) != manifest.config.get("device")
    if (rows := buffer.rows()) is not None:
        # Large pages must be requested before `load_state` writes to the columns.
        num_slots = sum(file.arrays[2].shape[0] for file in manifest.segments)
        for column in rows.columns.values():
            request_large_pages(column.flatten(0, 1)[:num_slots])
    with buffer._replacing_contents():
        buffer.load_state(saved)
        if "note" in manifest.values:
            saved.part("note").read_all_arrays(MAX_NOTE_BYTES)
        saved.require_all_read(manifest.kind)
        segments = _read_rows(archive, manifest, buffer.rows())
    buffer.check()
    return buffer, segments


def _read_rows(archive: Archive, manifest: Manifest, rows: Rows | None) -> list[Segment]:
    """Read all segments into the rows of a buffer whose state was restored before."""
    if rows is None:
        if manifest.segments:
            got = len(manifest.segments)
            raise CorruptCheckpoint(explain("segments", "no segments", got, "Copy the checkpoint again."))
        return []
    total = sum(file.nbytes for file in manifest.segments)
    segments, covered_until, last_stop = [], rows.first.clone(), torch.zeros_like(rows.first)
    for file in manifest.segments:
        # The stamp is taken first, so that a change of the file during the read is detected later.
        stamp = archive.read_segment_stamp(file)
        try:
            first, last_stop = _read_segment(archive, file, rows, total, last_stop)
        except CorruptCheckpoint:
            # If bytes of the file are damaged, `verify_segment` raises a clearer error.
            archive.verify_segment(file)
            raise
        _require_in_every_env(
            first <= covered_until, f"segments/{file.name}", "a first row of at most", covered_until, first
        )
        covered_until = torch.maximum(covered_until, last_stop)
        segments.append(Segment(file, last_stop, stamp))
    _require_in_every_env(covered_until == rows.stop, "segments", "rows up to", rows.stop, covered_until)
    return segments


def _require_in_every_env(
    is_valid: torch.Tensor, where: str, label: str, expected: torch.Tensor, got: torch.Tensor
) -> None:
    """Raise unless `is_valid` [N] is true in every environment."""
    if not bool(is_valid.all()):
        env = int((~is_valid).int().argmax())
        place = f"{where}, environment {env}"
        raise CorruptCheckpoint(explain(place, f"{label} {int(expected[env])}", int(got[env]), "Copy it again."))


def _read_segment(
    archive: Archive, file: FileInfo, rows: Rows, total_bytes: int, last_stop: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a segment into the rows of a buffer, and return its bounds [N].

    `last_stop` [N] are the ends of the previous segment.
    """
    where = f"segments/{file.name}"
    with archive.open_segment(file) as reader:
        first, stop = _read_bounds(reader, file, where, last_stop)
        segment = Rows(rows.columns, first, stop)
        if file.arrays != segment.segment_arrays:
            expected = f"the columns {segment.segment_arrays[2:]}"
            raise CorruptCheckpoint(explain(where, expected, file.arrays[2:], "Copy it again."))
        _require_in_every_env(stop <= rows.stop, where, "rows up to", rows.stop, stop)
        pieces: list[tuple[Any, torch.Tensor | None]] = [(piece, None) for piece in segment.slot_pieces()]
        if bool((first < rows.first).any()):
            # Rows before `rows.first` are not stored: newer rows have their slots.
            row, env = segment.row_and_env_numbers()
            slots_and_masks = segment.flat_slots(), row >= rows.first[env]
            pieces = list(zip(*(each.split(segment.rows_per_piece) for each in slots_and_masks), strict=True))
        flat_columns = (as_indexable(column.flatten(0, 1)) for column in rows.columns.values())
        filled_memory = (_read_piece(reader, flat, *piece, where) for flat in flat_columns for piece in pieces)
        for _ in show_progress(filled_memory, total_bytes, "loading rows"):
            pass
        reader.require_end()
    return first, stop


def _read_bounds(
    reader: SegmentReader, file: FileInfo, where: str, last_stop: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and verify the first row [N] of each environment in a segment, and the row [N] after its last one."""
    envs, remedy = len(last_stop), "Copy it again."
    bounds = torch.empty(2, envs, dtype=torch.int64, device="cpu")
    expected = tuple(describe_array(name, bounds[0]) for name in ("first", "stop"))
    if file.arrays[:2] != expected:
        raise CorruptCheckpoint(explain(where, f"the arrays {expected} first", file.arrays[:2], remedy))
    reader.read_into(writable_memory(bounds))
    first, stop = bounds.numpy()
    max_row, max_length = (1 << 62) // max(envs, 1), int((stop - first).max())
    if (first < 0).any() or (stop < first).any() or (stop > max_row).any() or max_length > max_row // 4:
        got = f"{first.min()} to {stop.max()}, at most {max_length} per environment"
        raise CorruptCheckpoint(explain(where, "first rows from 0, and stops after them", got, remedy))
    if (first < last_stop.numpy()).any() or (first == stop).all():
        got = f"rows from {first.tolist()} to {stop.tolist()}"
        raise CorruptCheckpoint(explain(where, "rows, after those of the segment before", got, remedy))
    return bounds[0], bounds[1]


def _read_piece(
    reader: SegmentReader, column: torch.Tensor, piece: Any, is_kept: torch.Tensor | None, where: str
) -> memoryview:
    """Read the next bytes of a segment into the slots `piece` of a column [slots · N, …], and return them.

    Rows outside the mask `is_kept`, if there is one, are read but not stored.
    """
    is_slice = isinstance(piece, slice)
    size = piece.stop - piece.start if is_slice else len(piece)
    block = column[piece] if is_slice and column.is_cpu else column.new_empty((size, *column.shape[1:]), device="cpu")
    memory = writable_memory(block)
    reader.read_into(memory)
    require_bool_bytes(block, where)
    if not is_slice:
        flat_slots, block = (piece, block) if is_kept is None else (piece[is_kept], block[is_kept])
        column[flat_slots.to(column.device)] = block.to(column.device)
    elif not column.is_cpu:
        column[piece] = block.to(column.device)
    return memory


def _describe_changes(manifest: Manifest, buffer: Any) -> list[str]:
    """Describe how the device and the kind of memory of a buffer differ from the saved buffer."""
    old_device, device = manifest.config.get("device"), str(buffer.device)
    changes = []
    if old_device is not None and old_device != device:
        changes.append(f"device {old_device} became {device}; draws will differ from those of the saved buffer.")
    memory = buffer.state()[0].get("memory")
    if memory is not None:
        # The oldest checkpoints do not contain the name of the memory.
        saved = manifest.values.get("memory", {"name": "own"})
        node = JsonNode(f"{manifest_file_name(manifest.number)}: values: memory", saved)
        old_name = node.entry("name").text()
        if old_name != memory["name"]:
            changes.append(f"{old_name} memory became {memory['name']} memory.")
    return changes


def _require_class(where: str, kind: type | None, class_name: str) -> None:
    """Raise an IncompatibleCheckpoint if `class_name` is not the name of the expected class."""
    if kind is not None and BUFFER_CLASSES.get(class_name) is not kind:
        remedy = "Load it without kind, or look for the right folder."
        raise IncompatibleCheckpoint(explain(where, f"a {kind.__name__}", f"a {class_name}", remedy))
