"""Commits of disk memory: the heads of the rings, and everything about a buffer that is not in its arrays.

There are two files for it, written in turn: while one is being written, the other is whole.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relive.errors import CheckpointError, CorruptCheckpoint, explain
from relive.storage.codec import (
    CHUNK,
    MOST_BYTES,
    Arrays,
    ArraySource,
    array_info,
    arrays_from_json,
    arrays_in_file,
    arrays_to_json,
    bytes_of,
    format_of,
    from_json,
    reader_for,
    require_first_line,
    to_json,
    with_checksum,
)
from relive.storage.files import Files, is_read_error, reading

_RUN_OF_MACHINE = Path("/proc/sys/kernel/random/boot_id")
NAMES = ("commit0", "commit1")
_MOST_BYTES = 1 << 30
"""No record is longer."""
_LONGEST_HEADER = 64
_BOOT = re.compile(r".{0,128}")


@dataclass(frozen=True)
class Commit:
    """One commit."""

    number: int
    boot: str
    """The run of the machine that wrote it."""
    is_closed: bool
    """Written by `close()`: no row came after it."""
    max_rows_since_commit: int
    """How many rows an environment may have got since, at most."""
    slots_checksum: int
    """The checksum of what each slot held."""
    checksum: int
    """That of all arrays that are no rows, where it is closed."""
    config: dict[str, Any]
    values: dict[str, Any]
    arrays: ArraySource | Arrays
    """Read from a file, or to be written."""

    @property
    def name(self) -> str:
        """The file that it is in."""
        return NAMES[self.number % 2]


def boot() -> str:
    """The id of this run of the machine: pages of an earlier one may not have reached the disk."""
    return _RUN_OF_MACHINE.read_text().strip()


def dump(record: Commit, length: int = 0) -> bytes:
    """A record as bytes: a line with a checksum, a line of JSON, and arrays.

    Spaces after the JSON make it as long as `length`, if they fit into a description.
    """
    assert isinstance(record.arrays, dict)
    document = {
        "number": record.number,
        "boot": record.boot,
        "closed": record.is_closed,
        "reach": record.max_rows_since_commit,
        "marks": record.slots_checksum,
        "checksum": record.checksum,
        "config": record.config,
        "values": record.values,
        "arrays": arrays_to_json(array_info(name, array) for name, array in record.arrays.items()),
    }
    head, arrays = to_json(document), b"".join(map(bytes_of, record.arrays.values()))
    for what, nbytes, most in (
        ("description", len(head), MOST_BYTES),
        ("arrays", len(arrays), _MOST_BYTES - 2 * MOST_BYTES),
    ):
        if nbytes > most:
            remedy = "Declare fewer fields or environments."
            raise CheckpointError(explain(f"commit: {what}", f"at most {most} bytes", nbytes, remedy))
    missing = length - len(with_checksum(b"")) - len(head) - 1 - len(arrays)
    if missing <= MOST_BYTES - len(head):
        head += b" " * missing
    return with_checksum(b"\n".join([head, arrays]))


def parse(where: str, read_at: Callable[[int, int], bytes], nbytes: int) -> Commit:
    """The record in a file of `nbytes`, whose bytes `read_at(count, offset)` gives."""
    version = format_of(where, read_at(_LONGEST_HEADER, 0).partition(b"\n")[0])
    return reader_for(where, version, READERS)(where, read_at, nbytes)


def _format_1(where: str, read_at: Callable[[int, int], bytes], nbytes: int) -> Commit:
    start = _require_whole(where, read_at, nbytes)
    head, found, _ = read_at(MOST_BYTES + 1, start).partition(b"\n")
    if not found or len(head) > MOST_BYTES:
        place = f"{where}, bytes {start} to {start + len(head)}"
        expected = f"a line of at most {MOST_BYTES} bytes"
        raise CorruptCheckpoint(explain(place, expected, "a longer line", "Copy it again."))
    node, rest = from_json(where, head), start + len(head) + 1
    listed = arrays_from_json(node.entry("arrays"))
    arrays = arrays_in_file(where, listed, _filler(where, read_at, rest))
    if sum(array.nbytes for array in listed) != nbytes - rest:
        raise node.entry("arrays").error(f"arrays of {nbytes - rest} bytes")
    return Commit(
        node.entry("number").integer(1),
        node.entry("boot").text(_BOOT),
        node.entry("closed").flag(),
        node.entry("reach").integer(1),
        node.entry("marks").integer(0, 2**32 - 1),
        node.entry("checksum").integer(0, 2**32 - 1),
        node.entry("config").mapping(),
        node.entry("values").mapping(),
        arrays,
    )


READERS: dict[int, Callable[[str, Callable[[int, int], bytes], int], Commit]] = {1: _format_1}
"""The reader of a commit by its format: `reader(where, read_at, nbytes)`."""


def _require_whole(where: str, read_at: Callable[[int, int], bytes], nbytes: int) -> int:
    """The checksum of the first line is that of the rest; returns where the rest begins."""
    first = read_at(_LONGEST_HEADER, 0).partition(b"\n")[0]
    start, found = len(first) + 1, 0
    for offset in range(start, nbytes, CHUNK):
        found = zlib.crc32(read_at(min(CHUNK, nbytes - offset), offset), found)
    require_first_line(where, first, found, nbytes)
    return start


def _filler(where: str, read_at: Callable[[int, int], bytes], start: int) -> Callable[[int, memoryview], None]:
    def fill(offset: int, target: memoryview) -> None:
        while len(target):
            piece = read_at(min(len(target), CHUNK), start + offset)
            if not piece:
                raise CorruptCheckpoint(explain(where, "all bytes of its arrays", "a shorter file", "Copy it again."))
            target[: len(piece)] = piece
            target, offset = target[len(piece) :], offset + len(piece)

    return fill


def newest(root: Path) -> Commit:
    """The last commit that is whole."""
    found: list[Commit] = []
    wrong: list[str] = []
    for name in NAMES:
        try:
            record = _read(Files(root), name)
            if record.name != name:
                raise CorruptCheckpoint(explain(name, "the commit of this name", record.name, "Copy it again."))
            found.append(record)
        except CorruptCheckpoint as error:
            if is_read_error(error):  # it may be the newest, and was acknowledged
                raise
            wrong.append(str(error))  # the error itself would keep alive whoever asked
    if not found:
        raise CorruptCheckpoint(wrong[0])
    return max(found, key=lambda record: record.number)


def _read(files: Files, name: str) -> Commit:
    def read_at(count: int, offset: int) -> bytes:
        with reading(name):
            return files.contents(name, count, offset)

    with reading(name):
        nbytes = files.size(name)
    if nbytes > _MOST_BYTES:
        raise CorruptCheckpoint(explain(name, f"at most {_MOST_BYTES} bytes", nbytes, "Copy it again."))
    return parse(name, read_at, nbytes)
