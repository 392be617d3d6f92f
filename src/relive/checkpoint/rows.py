"""Rows that never change once they are written: their bytes in the order of a file, and reading them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from relive.checkpoint.archive import Archive, File, Manifest, ReadFile
from relive.checkpoint.progress import watched
from relive.errors import CorruptCheckpoint, explain
from relive.schema.conversion import bits_of
from relive.storage.allocator import expect_bulk
from relive.storage.codec import ArrayInfo, Arrays, bytes_of, dtype_name, memory_of, require_flags
from relive.storage.files import Stamp

_BLOCK = 1 << 22
"""Bytes that are copied at once where memory cannot be written as it lies."""


@dataclass
class Rows:
    """Rows that never change once they are written: columns `[slots, N, …]`, row r of an environment at r mod slots.

    In memory are the rows `first[e]` to `stop[e]` of each environment e.
    """

    columns: Arrays
    first: torch.Tensor
    stop: torch.Tensor

    @property
    def slots(self) -> int:
        """How many rows of an environment there is room for."""
        return len(next(iter(self.columns.values())))

    def since(self, saved: torch.Tensor) -> Rows:
        """The rows from `saved[e]` on."""
        return Rows(self.columns, torch.minimum(torch.maximum(self.first, saved), self.stop), self.stop)

    def __len__(self) -> int:
        return int((self.stop - self.first).sum())

    @property
    def nbytes(self) -> int:
        """The bytes of all columns together."""
        return sum(len(self) * column[0, 0].nbytes for column in self.columns.values())

    @property
    def arrays(self) -> tuple[ArrayInfo, ...]:
        """The arrays of a segment: which rows, and their columns."""
        envs, count = len(self.first), len(self)
        bounds = tuple(ArrayInfo(name, "int64", (envs,)) for name in ("first", "stop"))
        return bounds + tuple(
            ArrayInfo(name, dtype_name(column.dtype), (count, *column.shape[2:]))
            for name, column in self.columns.items()
        )

    def parts(self) -> Iterator[memoryview]:
        """Their bytes, without a copy where the rows of all environments lie in one piece."""
        yield bytes_of(self.first)
        yield bytes_of(self.stop)
        pieces = self.pieces()
        for column in self.columns.values():
            flat = bits_of(column.flatten(0, 1))
            for piece in pieces:
                yield bytes_of(flat[piece])

    def pieces(self) -> list[Any]:
        """Slots of the rows in columns `[slots · N, …]`, in the order of a segment: by time if all environments have
        the same rows, else by environment."""
        envs, slots, step = len(self.first), self.slots, self.step
        if self.is_even:
            first, stop = int(self.first[0]), int(self.stop[0])
            edges = sorted({first, stop, *range(first - first % slots + slots, stop, slots)})
            runs = [(a % slots * envs, (b - a) * envs) for a, b in pairwise(edges)]
            return [slice(at + i, at + min(i + step, size)) for at, size in runs for i in range(0, size, step)]
        return list(self.places(slots).split(step))

    @property
    def step(self) -> int:
        """How many rows are copied at once."""
        widest = max(column[0, 0].nbytes for column in self.columns.values())
        return max(_BLOCK // max(widest, 1), 1)

    @property
    def is_even(self) -> bool:
        """All environments have the same rows."""
        return bool((self.first == self.first[0]).all() and (self.stop == self.stop[0]).all())

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row and the environment of each, in the order of a segment."""
        envs = torch.arange(len(self.first), device="cpu")
        if self.is_even:
            rows = torch.arange(int(self.first[0]), int(self.stop[0]), device="cpu")
            return rows.repeat_interleave(len(envs)), envs.repeat(len(rows))
        sizes = self.stop - self.first
        env = envs.repeat_interleave(sizes)
        return torch.arange(len(env), device="cpu") - (sizes.cumsum(0) - sizes - self.first)[env], env

    def places(self, slots: int) -> torch.Tensor:
        """Their flat slots in columns of `slots`."""
        row, env = self.numbers()
        return row % slots * len(self.first) + env


class Segment(NamedTuple):
    """A file of rows that this process has written, or has read and verified."""

    file: File
    stop: torch.Tensor
    """The rows [N] that it ends before."""
    stamp: Stamp
    """Its stamp at that time."""


def read_rows(archive: Archive, manifest: Manifest, rows: Rows | None) -> list[Segment]:
    """Fill the rows of a buffer, whose state is there already."""
    if rows is None:
        if manifest.segments:
            got = len(manifest.segments)
            raise CorruptCheckpoint(explain("segments", "no segments", got, "Copy the checkpoint again."))
        return []
    total = sum(file.nbytes for file in manifest.segments)
    segments, covered, ended = [], rows.first.clone(), torch.zeros_like(rows.first)
    for file in manifest.segments:
        stamp = archive.stamp(file)  # before it is read: what is written into it afterwards shows
        try:
            first, ended = _read_segment(archive, file, rows, total, ended)
        except CorruptCheckpoint:
            archive.verify("segments", file)  # if bytes are damaged, that is what to say, and where
            raise
        _require(first <= covered, f"segments/{file.name}", "a first row of at most", covered, first)
        covered = torch.maximum(covered, ended)
        segments.append(Segment(file, ended, stamp))
    _require(covered == rows.stop, "segments", "rows up to", rows.stop, covered)
    return segments


def _require(holds: torch.Tensor, where: str, what: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    """Something holds in every environment."""
    if not bool(holds.all()):
        env = int((~holds).int().argmax())
        place = f"{where}, environment {env}"
        raise CorruptCheckpoint(explain(place, f"{what} {int(expected[env])}", int(got[env]), "Copy it again."))


def _read_segment(
    archive: Archive, file: File, rows: Rows, total: int, ended: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    where = f"segments/{file.name}"
    with archive.reading_of("segments", file) as source:
        first, stop = _bounds(source, file, len(rows.first), ended)
        held = Rows(rows.columns, first, stop)
        if file.arrays != held.arrays:
            expected = f"the columns {held.arrays[2:]}"
            raise CorruptCheckpoint(explain(where, expected, file.arrays[2:], "Copy it again."))
        _require(stop <= rows.stop, where, "rows up to", rows.stop, stop)
        columns = [bits_of(column.flatten(0, 1)) for column in rows.columns.values()]
        pieces = _pieces(held, rows.first)
        for flat in columns:
            expect_bulk(_destination(flat, pieces))
        filled = (_fill(source, flat, *piece, where) for flat in columns for piece in pieces)
        deque(watched(filled, total, "loading rows"), 0)
        source.finish()
    return first, stop


def _bounds(source: ReadFile, file: File, envs: int, ended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rows [N] of a segment, and the rows [N] that it ends before."""
    where, remedy = f"segments/{file.name}", "Copy it again."
    expected = tuple(ArrayInfo(name, "int64", (envs,)) for name in ("first", "stop"))
    if file.arrays[:2] != expected:
        raise CorruptCheckpoint(explain(where, f"the arrays {expected} first", file.arrays[:2], remedy))
    first, stop = (torch.empty(envs, dtype=torch.int64, device="cpu") for _ in range(2))
    for bound in (first, stop):
        source.fill(memory_of(bound))
    most = (1 << 62) // max(envs, 1)
    if bool(((first < 0) | (stop < first) | (stop > most)).any()) or int((stop - first).max()) > most // 4:
        got = f"{int(first.min())} to {int(stop.max())}, at most {int((stop - first).max())} per environment"
        raise CorruptCheckpoint(explain(where, "first rows from 0, and stops after them", got, remedy))
    if bool((first < ended).any()) or bool((first == stop).all()):
        got = f"rows from {first.tolist()} to {stop.tolist()}"
        raise CorruptCheckpoint(explain(where, "rows, after those of the segment before", got, remedy))
    return first, stop


def _pieces(held: Rows, oldest: torch.Tensor) -> list[tuple[Any, torch.Tensor | None]]:
    """Slots of the rows of a segment, in its order: slices of slots, or slots and which of them (None: all).

    Rows before `oldest` [N] were overwritten since, and are left out, so that no two rows fall on one slot.
    """
    if bool((held.first >= oldest).all()):
        return [(piece, None) for piece in held.pieces()]
    row, env = held.numbers()
    places, keep = held.places(held.slots), row >= oldest[env]
    return list(zip(places.split(held.step), keep.split(held.step), strict=True))


def _destination(flat: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
    """The part of a column that pieces of slots lie in."""
    if not isinstance(pieces[0][0], slice):
        return flat
    return flat[min(piece.start for piece, _ in pieces) : max(piece.stop for piece, _ in pieces)]


def _fill(source: ReadFile, flat: torch.Tensor, piece: Any, keep: torch.Tensor | None, where: str) -> memoryview:
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
