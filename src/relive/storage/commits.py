"""Commits of disk memory: the heads of the rings, and the state of a buffer outside its arrays.

Two files are written alternately: while one is being written, the other is complete.
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

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMES = ("commit0", "commit1")
_MAX_COMMIT_BYTES = 1 << 30
"""Maximum bytes of a commit."""
_MAX_HEADER_BYTES = 64
_BOOT = re.compile(r".{0,128}")


@dataclass(frozen=True)
class Commit:
    """The state of a buffer at one commit."""

    number: int
    boot: str
    """Id of the boot of the machine during which it was written."""
    is_closed: bool
    """Whether `close()` wrote it: no row was added afterwards."""
    max_rows_since_commit: int
    """Maximum number of rows that an environment may have received since the commit."""
    slots_checksum: int
    """Checksum of the kinds and starts of all slots."""
    checksum: int
    """Checksum of all arrays except rows; 0 unless closed."""
    config: dict[str, Any]
    values: dict[str, Any]
    arrays: ArraySource | Arrays
    """A source when read from a file, tensors when about to be written."""

    @property
    def name(self) -> str:
        """Name of its file."""
        return NAMES[self.number % 2]


def boot() -> str:
    """Id of the current boot of the machine: pages of an earlier boot may not have reached the disk."""
    return _BOOT_ID.read_text().strip()


def dump(record: Commit, length: int = 0) -> bytes:
    """Encode a commit: a line with a checksum, a line of JSON, and arrays.

    Spaces after the JSON pad it to `length` bytes, if the padded line is not too long.
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
        ("arrays", len(arrays), _MAX_COMMIT_BYTES - 2 * MOST_BYTES),
    ):
        if nbytes > most:
            remedy = "Declare fewer fields or environments."
            raise CheckpointError(explain(f"commit: {what}", f"at most {most} bytes", nbytes, remedy))
    missing = length - len(with_checksum(b"")) - len(head) - 1 - len(arrays)
    if missing <= MOST_BYTES - len(head):
        head += b" " * missing
    return with_checksum(b"\n".join([head, arrays]))


def parse(where: str, read_at: Callable[[int, int], bytes], nbytes: int) -> Commit:
    """Parse the commit in a file of `nbytes`; `read_at(count, offset)` reads it."""
    version = format_of(where, read_at(_MAX_HEADER_BYTES, 0).partition(b"\n")[0])
    return reader_for(where, version, READERS)(where, read_at, nbytes)


def _format_1(where: str, read_at: Callable[[int, int], bytes], nbytes: int) -> Commit:
    start = _verify_checksum(where, read_at, nbytes)
    head, newline, _ = read_at(MOST_BYTES + 1, start).partition(b"\n")
    if not newline or len(head) > MOST_BYTES:
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
"""Reader of each format: `reader(where, read_at, nbytes)`."""


def _verify_checksum(where: str, read_at: Callable[[int, int], bytes], nbytes: int) -> int:
    """Verify the checksum in the first line, and return the offset after that line."""
    first = read_at(_MAX_HEADER_BYTES, 0).partition(b"\n")[0]
    start, checksum = len(first) + 1, 0
    for offset in range(start, nbytes, CHUNK):
        checksum = zlib.crc32(read_at(min(CHUNK, nbytes - offset), offset), checksum)
    require_first_line(where, first, checksum, nbytes)
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
    """Return the newest intact commit."""
    records: list[Commit] = []
    errors: list[str] = []
    for name in NAMES:
        try:
            record = _read(Files(root), name)
            if record.name != name:
                raise CorruptCheckpoint(explain(name, "the commit of this name", record.name, "Copy it again."))
            records.append(record)
        except CorruptCheckpoint as error:
            if is_read_error(error):  # the unreadable file may be the newest commit
                raise
            errors.append(str(error))  # the error itself would keep its callers' frames alive
    if not records:
        raise CorruptCheckpoint(errors[0])
    return max(records, key=lambda record: record.number)


def _read(files: Files, name: str) -> Commit:
    def read_at(count: int, offset: int) -> bytes:
        with reading(name):
            return files.contents(name, count, offset)

    with reading(name):
        nbytes = files.size(name)
    if nbytes > _MAX_COMMIT_BYTES:
        raise CorruptCheckpoint(explain(name, f"at most {_MAX_COMMIT_BYTES} bytes", nbytes, "Copy it again."))
    return parse(name, read_at, nbytes)
