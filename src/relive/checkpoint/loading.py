"""Reading a buffer: structure and sizes are checked before memory is asked for, checksums as the bytes come."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from relive.checkpoint import kinds
from relive.checkpoint.contents import Read, Rows, here
from relive.checkpoint.manifest import File, Manifest
from relive.checkpoint.progress import watched
from relive.checkpoint.saving import Base, Segment
from relive.checkpoint.vault import Vault
from relive.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvariantError,
    NoCheckpoint,
    SchemaError,
    explain,
)
from relive.fields.schema import positive
from relive.kernels.reader import bits_of
from relive.memory import Memory
from relive.memory.disk.reopening import examined_disk, is_disk_memory, peek, reopened
from relive.memory.documents import Array, Node
from relive.memory.files import Files
from relive.memory.saved import DTYPES, MOST_OF_NOTE, Arrays, Stored, memory_of, named, require_flags
from relive.replay.samplers import Counted, Prioritized, Sampler, Uniform

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
    capacity: int | None = None,
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
    capacity: int | None = None,
    sampler: Sampler | None = None,
    files: type[Files] = Files,
) -> Buffer: ...


def load(
    path: str | PathLike[str],
    kind: Any = None,
    *,
    number: int | None = None,
    device: torch.device | str | Memory | None = None,
    capacity: int | None = None,
    sampler: Sampler | None = None,
    files: type[Files] = Files,
) -> Any:
    """The buffer that was saved below `path`: the newest valid checkpoint, or the one called `number`.

    It goes on exactly as the saved one would have: the same draws, the same epochs, the same statistics. Where `device`
    or `capacity` change it, a warning says how.

    Where `path` is the folder of a buffer in disk memory, that buffer is reopened; nothing of it can be changed then.

    A damaged checkpoint is passed over for an older one with a warning, unless it was named. CorruptCheckpoint,
    IncompatibleCheckpoint and NoCheckpoint say what is wrong and where. Nothing in a checkpoint is executed.

    Args:
        path: the folder that `save` was given, or that of a buffer in disk memory.
        kind: the buffer class that is expected there; any other is an IncompatibleCheckpoint. None takes any.
        number: which checkpoint, as `save` returned it; None takes the newest valid one.
        device: where to load it: a torch device, or a `Memory`; None is where it was.
        capacity: a new capacity, of a replay or distillation buffer; its newest rows stay.
        sampler: needed where the saved one was the caller's own, or had a function for `beta`.
        files: how files are read; for tests that make disks fail.
    """
    if capacity is not None:
        positive("capacity", capacity)
    options = {"device": device, "capacity": capacity, "sampler": sampler}
    return found(Path(path).absolute(), kind, number, options, files=files)


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
        _require_kind(root, kind, "ReplayBuffer")
        return reopened(root, {"number": number, **options})
    vault = Vault(root, files)
    with vault.reading():
        if number is not None:
            return _loaded(vault, number, kind, options, accept)
        damaged: list[str] = []  # no errors, whose tracebacks would keep all that was read
        for candidate in _worth_trying(vault):
            try:
                buffer = _loaded(vault, candidate, kind, options, accept)
            except CorruptCheckpoint as error:
                damaged.append(str(error))
                continue
            for wrong in damaged:
                warnings.warn(
                    f"load: skipped a damaged checkpoint and loaded number {candidate}. {wrong}", stacklevel=3
                )
            return buffer
    if damaged:
        raise CorruptCheckpoint(damaged[0])
    raise NoCheckpoint(explain(str(root), "at least 1 checkpoint", 0, "Save a buffer there first."))


def _require_kind(root: Path, kind: type | None, found: str) -> None:
    if kind is not None and kind.__name__ != found:
        remedy = "Load it without kind, or look for the right folder."
        raise IncompatibleCheckpoint(explain(str(root), f"a {kind.__name__}", f"a {found}", remedy))


_MOST_TRIED, _TRIED_ANYHOW, _PATIENCE, _MOST_READ = 64, 8, 60.0, 1 << 24
"""Checkpoints, checkpoints, seconds, and bytes of manifests."""


def _worth_trying(vault: Vault) -> Iterator[int]:
    """The newest checkpoints, the newest first: bounded in number, and after the first few in time and in bytes."""
    began, nbytes = time.monotonic(), 0
    for i, number in enumerate(vault.numbers()[: -_MOST_TRIED - 1 : -1]):
        nbytes += vault.size(number)
        if i >= _TRIED_ANYHOW and (time.monotonic() - began > _PATIENCE or nbytes > _MOST_READ):
            return
        yield number


Accept = Callable[[Any, Read], None]
"""Takes a buffer and what was read of it; a CheckpointError says that this is not what it should be."""


def _loaded(vault: Vault, number: int, kind: type | None, options: dict[str, Any], accept: Accept | None) -> Any:
    with named(f"manifests/{number:08}.json"):
        manifest = vault.manifest(number)
        _require_kind(vault.root, kind, manifest.kind)
        return _made(vault, manifest, dict(options), accept)


def _made(vault: Vault, manifest: Manifest, options: dict[str, Any], accept: Accept | None) -> Any:
    vault.require_files(manifest)
    where = f"manifests/{manifest.number:08}.json"
    if manifest.kind not in kinds.KINDS:
        remedy = "Load it with the version of relive that saved it."
        raise IncompatibleCheckpoint(explain(where, f"one of {', '.join(kinds.KINDS)}", manifest.kind, remedy))
    kind = kinds.KINDS[manifest.kind]
    config = Node(f"{where}: config", manifest.config)
    state = Stored(f"state/{manifest.state.name}", manifest.state.arrays, vault.fill("state", manifest.state))
    read = Read(config, Node(f"{where}: values", manifest.values), state)
    changes = _changes(manifest.kind, config, options)
    memory = _memory(manifest, where) if manifest.kind == "ReplayBuffer" and options["device"] is not None else None
    try:
        _require_columns(manifest, kind.columns(kind.make(read, {"sampler": options["sampler"], "device": "meta"})))
        buffer = kind.make(read, options)
        same_device = str(buffer.device) == config.entry("device").value
        with getattr(buffer, "_refilled", nullcontext)():
            saved = kind.restore(buffer, read, same_device=same_device)
            if "note" in manifest.values:
                read.part("note").tensors(MOST_OF_NOTE)
            read.finish(manifest.kind)
            segments = _read_rows(vault, manifest, kind.rows(buffer), read)
        buffer.check()
        if accept is not None:
            accept(buffer, read)
    except MemoryError as error:
        raise IncompatibleCheckpoint(
            f"{where}: the buffer does not fit into the memory of this machine. {error}"
        ) from error
    except SchemaError as error:  # what a buffer refuses to be made of
        raise CorruptCheckpoint(f"{where}: the description of the buffer is invalid. {error}") from error
    except InvariantError as error:  # what a buffer never is
        raise CorruptCheckpoint(f"state/{manifest.state.name}: the contents are invalid. {error}") from error
    if not changes:
        buffer._checkpoint = Base(vault.root, manifest.lineage, manifest.number, segments, saved)
    if memory is not None and memory != buffer.storage.memory.room.name:
        changes.append(f"{memory} memory became {buffer.storage.memory.room.name} memory.")
    for change in changes:
        warnings.warn(f"load: {change}", stacklevel=6)
    return buffer


def _require_columns(manifest: Manifest, columns: Arrays) -> None:
    """The files hold rows of just these columns, so that no memory is asked for rows that are only claimed."""
    wanted = [(name, column.dtype, tuple(column.shape[2:])) for name, column in columns.items()]
    held = [(f"segments/{file.name}", file.arrays[2:], 1) for file in manifest.segments]
    if manifest.kind == "RolloutBuffer":
        wanted = [(f"rows.{name}", column.dtype, tuple(column.shape)) for name, column in columns.items()]
        held = [(f"state/{manifest.state.name}", manifest.state.arrays[: len(wanted)], 0)]
    for where, arrays, lead in held:
        found = [(array.name, DTYPES[array.dtype], array.shape[lead:]) for array in arrays]
        if found != wanted:
            odd = next((got for got in found if got not in wanted), f"{len(found)} of {len(wanted)} columns")
            raise CorruptCheckpoint(explain(where, "the columns that the manifest declares", odd, "Copy it again."))


def _changes(kind: str, config: Node, options: dict[str, Any]) -> list[str]:
    """What the caller asks to be other than it was saved."""
    changes: list[str] = []
    if options["capacity"] is not None:
        if kind == "RolloutBuffer":
            remedy = "Leave capacity= out, or make a new buffer: a rollout is collected anew anyway."
            raise IncompatibleCheckpoint(explain("capacity", "no capacity= for a rollout", options["capacity"], remedy))
        saved = config.entry("capacity").integer(1)
        envs = config.value.get("num_envs") or 1
        if isinstance(envs, int) and options["capacity"] % envs:
            remedy = f"Pass {max(options['capacity'] // envs, 1) * envs}."
            expected = f"a multiple of num_envs={envs}"
            raise IncompatibleCheckpoint(explain("capacity", expected, options["capacity"], remedy))
        if options["capacity"] != saved:
            changes.append(
                f"capacity {saved} became {options['capacity']}; draws will differ from those of the saved buffer."
            )
        else:
            options["capacity"] = None
    if options["device"] is not None:
        before, after = config.entry("device").value, str(here(Memory.of(options["device"]).device))
        if before != after:
            changes.append(f"device {before} became {after}; draws will differ from those of the saved buffer.")
    return changes


def _memory(manifest: Manifest, where: str) -> str:
    """What kind of memory a replay buffer was saved from."""
    node = Node(f"{where}: values: memory", manifest.values.get("memory", {"name": "own"}))
    return node.entry("name").one_of(("own", "pinned", "shared", "disk"))


class _Source:
    """Checked pieces of a file, read as a stream."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces: Iterator[bytes] = iter(pieces)
        self._rest = memoryview(b"")

    def fill(self, target: memoryview) -> None:
        """The next bytes, as many as fit."""
        while len(target):
            if not len(self._rest):
                self._rest = memoryview(next(self._pieces))
            count = min(len(target), len(self._rest))
            target[:count] = self._rest[:count]
            target, self._rest = target[count:], self._rest[count:]

    def finish(self) -> None:
        """Nothing may be left."""
        if len(self._rest) or next(self._pieces, None) is not None:
            raise CorruptCheckpoint(explain("file", "only the bytes of its arrays", "further bytes", "Copy it again."))


def _longest(read: Read) -> int:
    """The most rows of an environment that one segment can have: those that the saved buffer had room for."""
    kind = read.form("ring.kind")
    return read.config.entry("capacity").integer() if kind is None else kind[1][0]


def _read_rows(vault: Vault, manifest: Manifest, rows: Rows | None, read: Read) -> list[Segment]:
    if rows is None:
        if manifest.segments:
            raise CorruptCheckpoint(
                explain("segments", "no segments", len(manifest.segments), "Copy the checkpoint again.")
            )
        return []
    total = sum(file.nbytes for file in manifest.segments)
    longest, segments, covered, ended = _longest(read), [], rows.first.clone(), torch.zeros_like(rows.first)
    for file in manifest.segments:
        stamp = vault.stamp(file)  # before it is read: what is written into it afterwards shows
        first, stop = _read_segment(vault, file, rows, total, longest, ended)
        ended = stop
        if bool((first > covered).any()):
            env = int((first > covered).int().argmax())
            place, expected = f"segments/{file.name}, environment {env}", f"a first row of at most {int(covered[env])}"
            raise CorruptCheckpoint(explain(place, expected, int(first[env]), "Copy it again."))
        covered = torch.maximum(covered, stop)
        segments.append(Segment(file, stop, stamp))
    if bool((covered != rows.stop).any()):
        env = int((covered != rows.stop).int().argmax())
        place, expected = f"segments, environment {env}", f"rows up to {int(rows.stop[env])}"
        raise CorruptCheckpoint(explain(place, expected, f"rows up to {int(covered[env])}", "Copy them again."))
    return segments


def _read_segment(
    vault: Vault, file: File, rows: Rows, total: int, longest: int, ended: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    where = f"segments/{file.name}"
    envs = len(rows.first)
    expected = [Array(name, "int64", (envs,)) for name in ("first", "stop")]
    if list(file.arrays[:2]) != expected:
        raise CorruptCheckpoint(explain(where, f"the arrays {expected} first", list(file.arrays[:2]), "Copy it again."))
    source = _Source(watched(vault.read("segments", file), total, "loading rows"))
    first, stop = (torch.empty(envs, dtype=torch.int64) for _ in range(2))
    for bound in (first, stop):
        source.fill(memory_of(bound))
    most = (1 << 62) // max(envs, 1)
    if bool(((first < 0) | (stop < first) | (stop > most)).any()) or int((stop - first).max()) > most // 4:
        got = f"{int(first.min())} to {int(stop.max())}, at most {int((stop - first).max())} per environment"
        raise CorruptCheckpoint(explain(where, "first rows from 0, and stops after them", got, "Copy it again."))
    if bool((first < ended).any()) or bool((first == stop).all()):
        expected = "rows, after those of the segment before"
        got = f"rows from {first.tolist()} to {stop.tolist()}"
        raise CorruptCheckpoint(explain(where, expected, got, "Copy it again."))
    most = int((stop - first).max())
    if most > longest:
        raise CorruptCheckpoint(explain(where, f"at most {longest} rows of an environment", most, "Copy it again."))
    held = Rows(rows.columns, first, stop)
    count = sum(int(size) for size in (stop - first).tolist())
    wanted = tuple(
        (array.name, array.dtype, (count, *array.shape[1:]))
        for array in Rows(rows.columns, first[:1], first[:1]).arrays[2:]
    )
    found = tuple((array.name, array.dtype, array.shape) for array in file.arrays[2:])
    if found != wanted:
        raise CorruptCheckpoint(explain(where, f"the columns {wanted}", found, "Copy it again."))
    if bool((stop > rows.stop).any()):
        env = int((stop > rows.stop).int().argmax())
        expected = f"rows up to {int(rows.stop[env])} in environment {env}"
        raise CorruptCheckpoint(explain(where, expected, f"rows up to {int(stop[env])}", "Copy it again."))
    places = held.places(rows.slots)
    # Of rows that fall on one slot the later stays, and rows that were overwritten since are left out.
    row, env = held.numbers()
    keep = row >= rows.first[env]
    for column in rows.columns.values():
        _fill_column(source, column, places, keep, where)
    source.finish()
    return first, stop


_BLOCK = 1 << 22


def _fill_column(source: _Source, column: torch.Tensor, places: torch.Tensor, keep: torch.Tensor, where: str) -> None:
    flat = bits_of(column.flatten(0, 1))
    step = max(_BLOCK // max(column[0, 0].numel() * column.element_size(), 1), 1)
    for start in range(0, len(places), step):
        at, kept = places[start : start + step], keep[start : start + step]
        in_order = flat.is_cpu and bool(kept.all()) and bool((at.diff() == 1).all())
        block = flat[at[0] : at[-1] + 1] if in_order else flat.new_empty((len(at), *flat.shape[1:]), device="cpu")
        source.fill(memory_of(block))
        require_flags(block, where)
        if not in_order:
            flat[at[kept].to(flat.device)] = block[kept].to(flat.device)


def look(path: str | PathLike[str], *, number: int | None = None) -> Any:
    """The buffer that is saved below `path`, to be looked at: files stay as they are, also those of disk memory.

    For a sampler that only its maker can make again, one of ours stands in that its state fits.
    """
    root = Path(path).absolute()
    if is_disk_memory(root):
        return peek(root)
    refused: list[IncompatibleCheckpoint] = []
    for sampler in (None, Prioritized(), Counted(Prioritized()), Uniform(), Counted(Uniform())):
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
    vault = Vault(root)
    with vault.reading():
        if not vault.numbers():
            raise NoCheckpoint(explain(str(path), "at least 1 checkpoint", 0, "Save a buffer there first."))
        for number in vault.numbers():
            try:
                look(path, number=number)
            except CheckpointError as error:
                yield number, error
            else:
                yield number, None
