"""Loading: the newest valid checkpoint below a folder, or the one that is asked for, or disk memory.

Structure and sizes are verified before memory is asked for, and one buffer is made.
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
from relive.checkpoint.snapshot import KINDS, MAX_NOTE_BYTES, Rows, SnapshotReader
from relive.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvariantError,
    NoCheckpoint,
    SchemaError,
    explain,
)  # fmt: skip
from relive.schema.conversion import bits_of
from relive.schema.fields import present
from relive.storage import Memory
from relive.storage.allocator import expect_bulk
from relive.storage.codec import ArrayInfo, Node, arrays_in_file, memory_of, require_flags
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
        sampler: needed where the saved one was the caller's own, or had a function for `beta`. Other exponents of a
            `Prioritized` apply to the stored priorities.
        files: how files are read; for tests that make disks fail.
    """
    return load_below(Path(path).absolute(), kind, number, {"device": device, "sampler": sampler}, files=files)


def load_below(
    root: Path,
    kind: type | None,
    number: int | None,
    options: dict[str, Any],
    *,
    files: type[Files] = Files,
    accept: Callable[[Any, SnapshotReader], None] | None = None,
) -> Any:
    """See `load`; `accept` is given the buffer and its saved state, and may call the checkpoint corrupt."""
    if is_disk_memory(root):
        require_class(str(root), kind, "ReplayBuffer")
        return _reopen(root, {"number": number, **options})
    archive = Archive(root, files)
    with archive.reading():
        if number is not None:
            return _restore(archive, number, kind, options, accept)
        # No errors, whose tracebacks would keep all that was read.
        damaged: dict[int, str] = {}
        unread: set[int] = set()
        for candidate in _candidates(archive):
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


_MAX_TRIED, _MIN_TRIED, _MAX_SECONDS, _MAX_MANIFEST_BYTES = 64, 8, 60.0, 1 << 24
"""Checkpoints, checkpoints, seconds, and bytes of manifests."""


def _candidates(archive: Archive) -> Iterator[int]:
    """The newest checkpoints, the newest first: bounded in number, and after the first few in time and in bytes."""
    began, nbytes = time.monotonic(), 0
    for i, number in enumerate(archive.numbers()[: -_MAX_TRIED - 1 : -1]):
        nbytes += archive.size(number)
        if i >= _MIN_TRIED and (time.monotonic() - began > _MAX_SECONDS or nbytes > _MAX_MANIFEST_BYTES):
            return
        yield number


def _restore(
    archive: Archive, number: int, kind: type | None, options: dict[str, Any], accept: Callable[..., None] | None
) -> Any:
    """The buffer of one checkpoint, but for what `options` change; a warning says what they changed."""
    where = manifest_file(number)
    with _naming_file(where):
        manifest = archive.manifest(number)
        require_class(str(archive.root), kind, manifest.kind)
        archive.require_files(manifest)
        if manifest.kind not in KINDS:
            remedy = "Load it with the version of relive that saved it."
            raise IncompatibleCheckpoint(explain(where, f"one of {', '.join(KINDS)}", manifest.kind, remedy))
        file = manifest.state
        arrays = arrays_in_file(f"state/{file.name}", file.arrays, archive.fill("state", file))
        saved = SnapshotReader.of(where, manifest.config, manifest.values, arrays)
        saved.segments = {f"segments/{segment.name}": segment.arrays for segment in manifest.segments}
        if options["device"] is not None:
            present(Memory.of(options["device"]).device)
        try:
            buffer = _make_buffer(archive, manifest, saved, options)
            if accept is not None:
                accept(buffer, saved)
        except MemoryError as error:
            text = f"{where}: the buffer does not fit into the memory of this machine. {error}"
            raise IncompatibleCheckpoint(text) from error
        except SchemaError as error:  # what a buffer refuses to be made of
            raise CorruptCheckpoint(f"{where}: the description of the buffer is invalid. {error}") from error
        except InvariantError as error:  # what a buffer never is
            raise CorruptCheckpoint(f"state/{file.name}: the contents are invalid. {error}") from error
        if options["device"] is not None:
            for change in _changes(manifest, buffer):
                warnings.warn(f"load: {change}", stacklevel=4)
        return buffer


@contextmanager
def _naming_file(file: str) -> Iterator[None]:
    """Errors that are raised here name the file."""
    try:
        yield
    except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
        if file.rpartition("/")[2].partition(".")[0] in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error.__cause__


def _make_buffer(archive: Archive, manifest: Manifest, saved: SnapshotReader, options: dict[str, Any]) -> Any:
    """A buffer with its state and its rows, every invariant of which holds."""
    buffer = KINDS[manifest.kind].from_config(saved.config, saved, **options)
    saved.is_moved = str(buffer.device) != manifest.config.get("device")
    _expect_rows(buffer.rows(), manifest)  # first: the state has observations that go into the same pages
    with getattr(buffer, "_refilled", nullcontext)():
        buffer.load_state(saved)
        if "note" in manifest.values:
            saved.part("note").tensors(MAX_NOTE_BYTES)
        saved.finish(manifest.kind)
        rows = buffer.rows()
        segments = _read_rows(archive, manifest, rows)
    buffer.check()
    base = PreviousSave(manifest.lineage, manifest.number, segments, None if rows is None else rows.stop)
    # With another config its rows may lie elsewhere.
    remember(buffer, archive.root, base if buffer.config() == manifest.config else base.without_rows())
    return buffer


def _expect_rows(rows: Rows | None, manifest: Manifest) -> None:
    """Get large pages for the rows of the segments, which fill the slots of a buffer from the first one on."""
    if rows is not None:
        count = sum(file.arrays[2].shape[0] for file in manifest.segments)
        for column in rows.columns.values():
            expect_bulk(column.flatten(0, 1)[:count])


def _read_rows(archive: Archive, manifest: Manifest, rows: Rows | None) -> list[Segment]:
    """Fill the rows of a buffer, whose state is there already."""
    if rows is None:
        if manifest.segments:
            got = len(manifest.segments)
            raise CorruptCheckpoint(explain("segments", "no segments", got, "Copy the checkpoint again."))
        return []
    total = sum(file.nbytes for file in manifest.segments)
    segments, covered, last_stop = [], rows.first.clone(), torch.zeros_like(rows.first)
    for file in manifest.segments:
        stamp = archive.stamp(file)  # before it is read: what is written into it afterwards shows
        try:
            first, last_stop = _read_segment(archive, file, rows, total, last_stop)
        except CorruptCheckpoint:
            archive.verify("segments", file)  # if bytes are damaged, that is what to say, and where
            raise
        _require(first <= covered, f"segments/{file.name}", "a first row of at most", covered, first)
        covered = torch.maximum(covered, last_stop)
        segments.append(Segment(file, last_stop, stamp))
    _require(covered == rows.stop, "segments", "rows up to", rows.stop, covered)
    return segments


def _require(holds: torch.Tensor, where: str, what: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    """Something holds in every environment."""
    if not bool(holds.all()):
        env = int((~holds).int().argmax())
        place = f"{where}, environment {env}"
        raise CorruptCheckpoint(explain(place, f"{what} {int(expected[env])}", int(got[env]), "Copy it again."))


def _read_segment(
    archive: Archive, file: FileInfo, rows: Rows, total: int, last_stop: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    where = f"segments/{file.name}"
    with archive.open_file("segments", file) as source:
        first, stop = _bounds(source, file, len(rows.first), last_stop)
        segment = Rows(rows.columns, first, stop)
        if file.arrays != segment.arrays:
            expected = f"the columns {segment.arrays[2:]}"
            raise CorruptCheckpoint(explain(where, expected, file.arrays[2:], "Copy it again."))
        _require(stop <= rows.stop, where, "rows up to", rows.stop, stop)
        columns = [bits_of(column.flatten(0, 1)) for column in rows.columns.values()]
        pieces = _pieces(segment, rows.first)
        filled = (_fill_piece(source, flat, *piece, where) for flat in columns for piece in pieces)
        deque(show_progress(filled, total, "loading rows"), 0)
        source.finish()
    return first, stop


def _bounds(
    source: FileReader, file: FileInfo, envs: int, last_stop: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rows [N] of a segment, and the rows [N] that it ends before."""
    where, remedy = f"segments/{file.name}", "Copy it again."
    expected = tuple(ArrayInfo(name, "int64", (envs,)) for name in ("first", "stop"))
    if file.arrays[:2] != expected:
        raise CorruptCheckpoint(explain(where, f"the arrays {expected} first", file.arrays[:2], remedy))
    bounds = torch.empty(2, envs, dtype=torch.int64, device="cpu")
    source.fill(memory_of(bounds))
    first, stop = bounds.numpy()
    most, longest = (1 << 62) // max(envs, 1), int((stop - first).max())
    if (first < 0).any() or (stop < first).any() or (stop > most).any() or longest > most // 4:
        got = f"{first.min()} to {stop.max()}, at most {longest} per environment"
        raise CorruptCheckpoint(explain(where, "first rows from 0, and stops after them", got, remedy))
    if (first < last_stop.numpy()).any() or (first == stop).all():
        got = f"rows from {first.tolist()} to {stop.tolist()}"
        raise CorruptCheckpoint(explain(where, "rows, after those of the segment before", got, remedy))
    first, stop = bounds
    return first, stop


def _pieces(segment: Rows, oldest: torch.Tensor) -> list[tuple[Any, torch.Tensor | None]]:
    """Slots of the rows of a segment, in its order: slices of slots, or slots and which of them (None: all).

    Rows before `oldest` [N] were overwritten since, and are left out, so that no two rows fall on one slot.
    """
    if bool((segment.first >= oldest).all()):
        return [(piece, None) for piece in segment.pieces()]
    row, env = segment.row_numbers()
    places, keep = segment.places(segment.slots), row >= oldest[env]
    return list(zip(places.split(segment.step), keep.split(segment.step), strict=True))


def _fill_piece(
    source: FileReader, flat: torch.Tensor, piece: Any, keep: torch.Tensor | None, where: str
) -> memoryview:
    """The next bytes of a segment, which are rows of one column."""
    is_run = isinstance(piece, slice)
    size = piece.stop - piece.start if is_run else len(piece)
    block = flat[piece] if is_run and flat.is_cpu else flat.new_empty((size, *flat.shape[1:]), device="cpu")
    memory = memory_of(block)
    source.fill(memory)
    require_flags(block, where)
    if not is_run:
        places, block = (piece, block) if keep is None else (piece[keep], block[keep])
        flat[places.to(flat.device)] = block.to(flat.device)
    elif not flat.is_cpu:
        flat[piece] = block.to(flat.device)
    return memory


def _changes(manifest: Manifest, buffer: Any) -> list[str]:
    """How the device or memory that the caller named differs from that of the saved buffer."""
    then, now = manifest.config.get("device"), str(buffer.device)
    changes = []
    if then is not None and then != now:
        changes.append(f"device {then} became {now}; draws will differ from those of the saved buffer.")
    after = buffer.state()[0].get("memory")
    if after is not None:
        # Buffers that were saved before there was any other memory do not name theirs.
        saved = manifest.values.get("memory", {"name": "own"})
        node = Node(f"{manifest_file(manifest.number)}: values: memory", saved)
        before = node.entry("name").text()
        if before != after["name"]:
            changes.append(f"{before} memory became {after['name']} memory.")
    return changes


def require_class(where: str, kind: type | None, found: str) -> None:
    """Raise an IncompatibleCheckpoint if the buffer called `found` is not of the expected class."""
    if kind is not None and KINDS.get(found) is not kind:
        remedy = "Load it without kind, or look for the right folder."
        raise IncompatibleCheckpoint(explain(where, f"a {kind.__name__}", f"a {found}", remedy))


def is_disk_memory(root: Path) -> bool:
    """Whether a folder says so of itself."""
    try:
        return holds_disk_memory(Files(root))
    except CorruptCheckpoint as error:
        if is_read_error(error):
            raise
        return False


def _reopen(root: Path, options: dict[str, Any]) -> Any:
    """The buffer in a folder of disk memory; of options only a sampler is taken."""
    changes = [name for name, value in options.items() if value is not None and name != "sampler"]
    if changes:
        remedy = "Save the buffer, and load that checkpoint with this argument."
        got = f"{changes[0]}={options[changes[0]]!r}"
        raise IncompatibleCheckpoint(explain(f"load {root}", "no changes to disk memory", got, remedy))
    return KINDS["ReplayBuffer"].from_disk(root, sampler=options.get("sampler"))
