"""Loading: the newest valid checkpoint of a folder, a given checkpoint, or disk memory.

Structure and sizes are verified before memory is allocated.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from relive import lazy
from relive.checkpoint.archive import Archive, FileInfo, FileReader, Manifest, manifest_file
from relive.checkpoint.progress import show_progress
from relive.checkpoint.saving import PreviousSave, Segment, remember, remember_damaged
from relive.checkpoint.snapshot import BUFFER_CLASSES, MAX_NOTE_BYTES, Rows, SnapshotReader
from relive.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvariantError,
    NoCheckpoint,
    SchemaError,
    explain,
)  # fmt: skip
from relive.schema.checks import check_available
from relive.schema.conversion import as_indexable
from relive.storage import Memory
from relive.storage.allocator import request_large_pages
from relive.storage.codec import ArrayInfo, Node, arrays_in_file, require_bool_bytes, writable_memory
from relive.storage.disk import holds_disk_memory
from relive.storage.files import Files, is_read_error

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
    sampler: lazy.Sampler | None = None,
    files: type[Files] = Files,
) -> ReplayBuffer | RolloutBuffer | DistillationBuffer: ...


@overload
def load(
    path: str | PathLike[str],
    kind: type[Buffer],
    *,
    number: int | None = None,
    device: torch.device | str | Memory | None = None,
    sampler: lazy.Sampler | None = None,
    files: type[Files] = Files,
) -> Buffer: ...


def load(
    path: str | PathLike[str],
    kind: Any = None,
    *,
    number: int | None = None,
    device: torch.device | str | Memory | None = None,
    sampler: lazy.Sampler | None = None,
    files: type[Files] = Files,
) -> Any:
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
    return load_folder(Path(path).absolute(), kind, number, {"device": device, "sampler": sampler}, files=files)


def load_folder(
    root: Path,
    kind: type | None,
    number: int | None,
    options: dict[str, Any],
    *,
    files: type[Files] = Files,
    accept: Callable[[Any, SnapshotReader], None] | None = None,
) -> Any:
    """See `load`. `accept(buffer, saved)` checks the loaded buffer, and may raise a CorruptCheckpoint."""
    if is_disk_memory(root):
        require_class(str(root), kind, "ReplayBuffer")
        return _reopen(root, {"number": number, **options})
    archive = Archive(root, files)
    with archive.lock_for_loading():
        if number is not None:
            return _restore(archive, number, kind, options, accept)
        # Messages, not errors: the tracebacks of errors would keep loaded data alive.
        damaged: dict[int, str] = {}
        unread: set[int] = set()
        for candidate in _iter_candidates(archive):
            try:
                buffer = _restore(archive, candidate, kind, options, accept)
            except CorruptCheckpoint as error:
                damaged[candidate] = str(error)
                if is_read_error(error):
                    unread.add(candidate)
                continue
            if damaged:
                remember_damaged(buffer, root, damaged.keys() - unread)
            for message in damaged.values():
                warnings.warn(
                    f"load: skipped a damaged checkpoint and loaded number {candidate}. {message}", stacklevel=3
                )
            return buffer
    if damaged:
        raise CorruptCheckpoint(next(iter(damaged.values())))
    raise NoCheckpoint(explain(str(root), "at least 1 checkpoint", 0, "Save a buffer there first."))


_MAX_CANDIDATES, _MIN_CANDIDATES, _MAX_SECONDS, _MAX_MANIFEST_BYTES = 64, 8, 60.0, 1 << 24
"""Limits of a search for a valid checkpoint: at most 64; after the first 8 also 60 seconds and 16 MB of manifests."""


def _iter_candidates(archive: Archive) -> Iterator[int]:
    """Yield the numbers of checkpoints to try, newest first, within the limits of a search."""
    start, nbytes = time.monotonic(), 0
    for i, number in enumerate(archive.numbers()[: -_MAX_CANDIDATES - 1 : -1]):
        nbytes += archive.size(number)
        if i >= _MIN_CANDIDATES and (time.monotonic() - start > _MAX_SECONDS or nbytes > _MAX_MANIFEST_BYTES):
            return
        yield number


def _restore(
    archive: Archive, number: int, kind: type | None, options: dict[str, Any], accept: Callable[..., None] | None
) -> Any:
    """Load one checkpoint; `options` (device, sampler) that are not None override it, with warnings."""
    where = manifest_file(number)
    with _prefix_file_name(where):
        manifest = archive.manifest(number)
        require_class(str(archive.root), kind, manifest.kind)
        archive.require_files(manifest)
        if manifest.kind not in BUFFER_CLASSES:
            remedy = "Load it with the version of relive that saved it."
            raise IncompatibleCheckpoint(explain(where, f"one of {', '.join(BUFFER_CLASSES)}", manifest.kind, remedy))
        file = manifest.state
        arrays = arrays_in_file(f"state/{file.name}", file.arrays, archive.fill("state", file))
        saved = SnapshotReader.of(where, manifest.config, manifest.values, arrays)
        saved.segments = {f"segments/{segment.name}": segment.arrays for segment in manifest.segments}
        if options["device"] is not None:
            check_available(Memory.of(options["device"]).device, IncompatibleCheckpoint)
        try:
            buffer = _make_buffer(archive, manifest, saved, options)
            if accept is not None:
                accept(buffer, saved)
        except MemoryError as error:
            text = f"{where}: the buffer does not fit into the memory of this machine. {error}"
            raise IncompatibleCheckpoint(text) from error
        except SchemaError as error:  # raised by the constructor of the buffer
            raise CorruptCheckpoint(f"{where}: the description of the buffer is invalid. {error}") from error
        except InvariantError as error:  # raised by `check()` of the buffer
            raise CorruptCheckpoint(f"state/{file.name}: the contents are invalid. {error}") from error
        if options["device"] is not None:
            for change in _describe_changes(manifest, buffer):
                warnings.warn(f"load: {change}", stacklevel=4)
        return buffer


@contextmanager
def _prefix_file_name(file: str) -> Iterator[None]:
    """Prefix the file name to errors of the body that do not contain it."""
    try:
        yield
    except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
        if file.rpartition("/")[2].partition(".")[0] in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error.__cause__


def _make_buffer(archive: Archive, manifest: Manifest, saved: SnapshotReader, options: dict[str, Any]) -> Any:
    """Make a buffer, restore its state and its rows, and check its invariants."""
    buffer = BUFFER_CLASSES[manifest.kind].from_config(saved.config, saved, **options)
    saved.is_moved = str(buffer.device) != manifest.config.get("device")
    _request_large_pages(buffer.rows(), manifest)  # must precede load_state, which writes to the same pages
    with getattr(buffer, "_refilled", nullcontext)():
        buffer.load_state(saved)
        if "note" in manifest.values:
            saved.part("note").tensors(MAX_NOTE_BYTES)
        saved.finish(manifest.kind)
        rows = buffer.rows()
        segments = _read_rows(archive, manifest, rows)
    buffer.check()
    previous = PreviousSave(manifest.lineage, manifest.number, segments, None if rows is None else rows.stop)
    # With another config the rows may be stored in other slots.
    remember(buffer, archive.root, previous if buffer.config() == manifest.config else previous.without_rows())
    return buffer


def _request_large_pages(rows: Rows | None, manifest: Manifest) -> None:
    """Request large pages for the slots that the segments fill."""
    if rows is not None:
        count = sum(file.arrays[2].shape[0] for file in manifest.segments)
        for column in rows.columns.values():
            request_large_pages(column.flatten(0, 1)[:count])


def _read_rows(archive: Archive, manifest: Manifest, rows: Rows | None) -> list[Segment]:
    """Read all segments into the rows of a buffer whose state is restored."""
    if rows is None:
        if manifest.segments:
            got = len(manifest.segments)
            raise CorruptCheckpoint(explain("segments", "no segments", got, "Copy the checkpoint again."))
        return []
    total = sum(file.nbytes for file in manifest.segments)
    segments, covered_until, last_stop = [], rows.first.clone(), torch.zeros_like(rows.first)
    for file in manifest.segments:
        stamp = archive.stamp(file)  # taken before reading: a change during or after the read is then detected
        try:
            first, last_stop = _read_segment(archive, file, rows, total, last_stop)
        except CorruptCheckpoint:
            archive.verify("segments", file)  # raises another error if bytes of the file are damaged
            raise
        _require_all(first <= covered_until, f"segments/{file.name}", "a first row of at most", covered_until, first)
        covered_until = torch.maximum(covered_until, last_stop)
        segments.append(Segment(file, last_stop, stamp))
    _require_all(covered_until == rows.stop, "segments", "rows up to", rows.stop, covered_until)
    return segments


def _require_all(holds: torch.Tensor, where: str, what: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    """Raise unless `holds` [N] is true in every environment."""
    if not bool(holds.all()):
        env = int((~holds).int().argmax())
        place = f"{where}, environment {env}"
        raise CorruptCheckpoint(explain(place, f"{what} {int(expected[env])}", int(got[env]), "Copy it again."))


def _read_segment(
    archive: Archive, file: FileInfo, rows: Rows, total: int, last_stop: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    where = f"segments/{file.name}"
    with archive.open_file("segments", file) as source:
        first, stop = _read_bounds(source, file, len(rows.first), last_stop)
        segment = Rows(rows.columns, first, stop)
        if file.arrays != segment.arrays:
            expected = f"the columns {segment.arrays[2:]}"
            raise CorruptCheckpoint(explain(where, expected, file.arrays[2:], "Copy it again."))
        _require_all(stop <= rows.stop, where, "rows up to", rows.stop, stop)
        columns = [as_indexable(column.flatten(0, 1)) for column in rows.columns.values()]
        pieces = _split_segment(segment, rows.first)
        filled_pieces = (_fill_piece(source, flat, *piece, where) for flat in columns for piece in pieces)
        deque(show_progress(filled_pieces, total, "loading rows"), 0)
        source.finish()
    return first, stop


def _read_bounds(
    source: FileReader, file: FileInfo, envs: int, last_stop: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and verify the bounds of a segment: its first rows [N] and its stops [N], which are exclusive."""
    where, remedy = f"segments/{file.name}", "Copy it again."
    expected = tuple(ArrayInfo(name, "int64", (envs,)) for name in ("first", "stop"))
    if file.arrays[:2] != expected:
        raise CorruptCheckpoint(explain(where, f"the arrays {expected} first", file.arrays[:2], remedy))
    bounds = torch.empty(2, envs, dtype=torch.int64, device="cpu")
    source.fill(writable_memory(bounds))
    first, stop = bounds.numpy()
    max_row, max_length = (1 << 62) // max(envs, 1), int((stop - first).max())
    if (first < 0).any() or (stop < first).any() or (stop > max_row).any() or max_length > max_row // 4:
        got = f"{first.min()} to {stop.max()}, at most {max_length} per environment"
        raise CorruptCheckpoint(explain(where, "first rows from 0, and stops after them", got, remedy))
    if (first < last_stop.numpy()).any() or (first == stop).all():
        got = f"rows from {first.tolist()} to {stop.tolist()}"
        raise CorruptCheckpoint(explain(where, "rows, after those of the segment before", got, remedy))
    first, stop = bounds
    return first, stop


def _split_segment(segment: Rows, oldest: torch.Tensor) -> list[tuple[Any, torch.Tensor | None]]:
    """Return the flat slots of a segment in its order, as pairs: slots, and a mask of rows to keep (None: all).

    Rows before `oldest` [N] are left out: newer rows use their slots.
    """
    if bool((segment.first >= oldest).all()):
        return [(piece, None) for piece in segment.pieces()]
    row, env = segment.row_numbers()
    flat_slots, keep = segment.flat_slots(segment.slots), row >= oldest[env]
    return list(zip(flat_slots.split(segment.step), keep.split(segment.step), strict=True))


def _fill_piece(
    source: FileReader, flat: torch.Tensor, piece: Any, keep: torch.Tensor | None, where: str
) -> memoryview:
    """Read rows of one column from a segment, and return their bytes."""
    is_slice = isinstance(piece, slice)
    size = piece.stop - piece.start if is_slice else len(piece)
    block = flat[piece] if is_slice and flat.is_cpu else flat.new_empty((size, *flat.shape[1:]), device="cpu")
    memory = writable_memory(block)
    source.fill(memory)
    require_bool_bytes(block, where)
    if not is_slice:
        flat_slots, block = (piece, block) if keep is None else (piece[keep], block[keep])
        flat[flat_slots.to(flat.device)] = block.to(flat.device)
    elif not flat.is_cpu:
        flat[piece] = block.to(flat.device)
    return memory


def _describe_changes(manifest: Manifest, buffer: Any) -> list[str]:
    """Describe how device and memory of a buffer differ from those of the saved buffer."""
    old_device, device = manifest.config.get("device"), str(buffer.device)
    changes = []
    if old_device is not None and old_device != device:
        changes.append(f"device {old_device} became {device}; draws will differ from those of the saved buffer.")
    memory = buffer.state()[0].get("memory")
    if memory is not None:
        # Checkpoints of early versions do not name the memory.
        saved = manifest.values.get("memory", {"name": "own"})
        node = Node(f"{manifest_file(manifest.number)}: values: memory", saved)
        old_name = node.entry("name").text()
        if old_name != memory["name"]:
            changes.append(f"{old_name} memory became {memory['name']} memory.")
    return changes


def require_class(where: str, kind: type | None, name: str) -> None:
    """Raise an IncompatibleCheckpoint if `name` is not the name of the expected class."""
    if kind is not None and BUFFER_CLASSES.get(name) is not kind:
        remedy = "Load it without kind, or look for the right folder."
        raise IncompatibleCheckpoint(explain(where, f"a {kind.__name__}", f"a {name}", remedy))


def is_disk_memory(root: Path) -> bool:
    """Whether a folder contains disk memory; False if its file FORMAT is of another kind or damaged."""
    try:
        return holds_disk_memory(Files(root))
    except CorruptCheckpoint as error:
        if is_read_error(error):
            raise
        return False


def _reopen(root: Path, options: dict[str, Any]) -> Any:
    """Open the buffer in a folder of disk memory; raise for options other than `sampler`."""
    changes = [name for name, value in options.items() if value is not None and name != "sampler"]
    if changes:
        remedy = "Save the buffer, and load that checkpoint with this argument."
        got = f"{changes[0]}={options[changes[0]]!r}"
        raise IncompatibleCheckpoint(explain(f"load {root}", "no changes to disk memory", got, remedy))
    return BUFFER_CLASSES["ReplayBuffer"].from_disk(root, sampler=options.get("sampler"))
