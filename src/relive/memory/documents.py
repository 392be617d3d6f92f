"""Documents in files that anybody may have written: strict JSON behind a line with its checksum, and lists of arrays.

Every type, size and name is checked here, before anything is allocated or opened. Nothing here knows torch.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from relive.errors import CorruptCheckpoint, IncompatibleCheckpoint, explain
from relive.fields.vocabulary import NAME

FORMAT = 1
"""What is written; older formats are read for ever."""
CHUNK = 1 << 22
"""A checksum covers this many bytes of a file; the last one what is left."""
MOST_BYTES = 1 << 21
"""No document is longer: parsed JSON takes up to 24 times as much memory."""
MOST_ARRAYS = 1 << 14
"""No file has more."""

ARRAY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}")
"""Names of arrays: the name of a field, and the part of a buffer that has it."""

_MOST = 1 << 62
_LONGEST_LINE = 64

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4,
    "float32": 4, "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""The dtypes that files may have."""


@dataclass(frozen=True)
class Array:
    """One tensor in a file; they lie behind each other in the order of the list."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Exact, however large."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def to_json(document: Any) -> bytes:
    """Strict JSON, in one line."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def wrapped(body: bytes) -> bytes:
    """Bytes behind a line with their checksum."""
    return b"recollect %d %08x\n" % (FORMAT, zlib.crc32(body)) + body


def list_of(arrays: Iterable[Array]) -> list[Any]:
    """Arrays as JSON."""
    return [[array.name, array.dtype, list(array.shape)] for array in arrays]


Reader = TypeVar("Reader")


def version_of(where: str, first: bytes) -> int:
    """The format that the first line of a file names. It is asked for before anything else is read."""
    header = re.match(rb"recollect ([0-9]{1,9}) ", first)
    if header is None:
        raise _no_first_line(where, first)
    return int(header[1])


def reader_of(where: str, version: int, readers: Mapping[int, Reader]) -> Reader:
    """The reader of a format; a format that is newer than all of them is an IncompatibleCheckpoint."""
    if version in readers:
        return readers[version]
    if version > max(readers):
        remedy = "Load it with a newer version of relive."
        raise IncompatibleCheckpoint(explain(where, f"format {max(readers)} at most", version, remedy))
    place = f"{where}, bytes 0 to {_LONGEST_LINE}"
    raise CorruptCheckpoint(explain(place, f"one of the formats {sorted(readers)}", version, _REMEDY))


def unwrapped(where: str, data: bytes) -> bytes:
    """What `wrapped` was given."""
    first, _, body = data.partition(b"\n")
    require_wrapping(where, first, zlib.crc32(body), len(data))
    return body


def _no_first_line(where: str, first: bytes) -> CorruptCheckpoint:
    place = f"{where}, bytes 0 to {min(len(first), _LONGEST_LINE)}"
    return CorruptCheckpoint(explain(place, "relive's first line", repr(first[:_LONGEST_LINE]), _REMEDY))


def require_wrapping(where: str, first: bytes, found: int, nbytes: int) -> None:
    """The first line of a file of `nbytes` has the checksum that was found of the rest."""
    header = re.fullmatch(rb"recollect ([0-9]{1,9}) ([0-9a-f]{8})", first)
    if header is None:
        raise _no_first_line(where, first)
    if found != int(header[2], 16):
        place = f"{where}, bytes {len(first) + 1} to {nbytes}"
        expected = f"the checksum {int(header[2], 16):08x}"
        raise CorruptCheckpoint(explain(place, expected, f"{found:08x}", _REMEDY))


def from_json(where: str, body: bytes) -> Node:
    """The document that `to_json` was given, or that somebody claims it was."""
    try:
        document = json.loads(body, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(explain(where, "strict JSON", error, _REMEDY)) from None
    return Node(where, document)


_REMEDY = "Load an older checkpoint, or copy this one again."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text}")
    return number


class Node:
    """A value of a document that nobody vouches for, and the place it was found at."""

    __slots__ = ("_at", "value")

    def __init__(self, where: str | tuple[Node, str], value: Any) -> None:
        self._at, self.value = where, value

    @property
    def where(self) -> str:
        """Put together when it is asked for: a document may have a million values."""
        return self._at if isinstance(self._at, str) else self._at[0].where + self._at[1]

    def wrong(self, expected: str) -> CorruptCheckpoint:
        """The error that says what should have been here."""
        got = reprlib.repr(self.value)  # however deep and long it is
        return CorruptCheckpoint(explain(self.where, expected, got if len(got) <= 80 else f"{got[:77]}…", _REMEDY))

    def entry(self, key: str) -> Node:
        """An entry of an object."""
        if not isinstance(self.value, dict) or key not in self.value:
            raise Node(self.where, sorted(self.value) if isinstance(self.value, dict) else self.value).wrong(
                f"an object with {key!r}"
            )
        return Node((self, f": {key}"), self.value[key])

    def entries(self) -> dict[str, Node]:
        """All entries of an object whose keys are names."""
        if not isinstance(self.value, dict) or not all(NAME.fullmatch(key) for key in self.value):
            raise self.wrong("an object with names as keys")
        return {key: Node((self, f": {key}"), value) for key, value in self.value.items()}

    def items(self, most: int = 1 << 20) -> list[Node]:
        """The items of a list."""
        if not isinstance(self.value, list) or len(self.value) > most:
            raise self.wrong(f"a list of at most {most} items")
        return [Node((self, f"[{i}]"), value) for i, value in enumerate(self.value)]

    def parts(self, count: int) -> list[Node]:
        """The items of a list that has just so many."""
        found = self.items(count)
        if len(found) != count:
            raise self.wrong(f"a list of {count} items")
        return found

    def integer(self, least: int = 0, most: int = _MOST) -> int:
        """A whole number within bounds."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value <= most:
            raise self.wrong(f"an integer from {least} to {most}")
        return self.value

    def number(self) -> float:
        """A finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or abs(self.value) >= 1 << 1023:
            raise self.wrong("a finite number")
        return float(self.value)

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def text(self, pattern: re.Pattern[str] = NAME) -> str:
        """A string of this pattern."""
        if not isinstance(self.value, str) or not pattern.fullmatch(self.value):
            raise self.wrong(f"text like {pattern.pattern}")
        return self.value

    def one_of(self, known: Mapping[str, Any] | tuple[str, ...]) -> str:
        """One of some words."""
        if not isinstance(self.value, str) or self.value not in known:
            raise self.wrong(f"one of {', '.join(known)}")
        return self.value

    def optional(self) -> Node | None:
        """Itself, or None for null."""
        return None if self.value is None else self

    def shape(self) -> tuple[int, ...]:
        """Sizes of axes."""
        return tuple(size.integer() for size in self.items(64))


def arrays_of(node: Node) -> tuple[Array, ...]:
    """The arrays that `list_of` was given."""
    arrays = tuple(_array(array) for array in node.items(MOST_ARRAYS))
    if len({array.name for array in arrays}) != len(arrays):
        raise node.wrong("arrays with distinct names")
    return arrays


def _array(node: Node) -> Array:
    name, dtype, shape = node.parts(3)
    array = Array(name.text(ARRAY_NAME), dtype.one_of(ITEM_BYTES), shape.shape())
    # Strides are products of sizes too, also where another axis is empty.
    if ITEM_BYTES[array.dtype] * math.prod(max(size, 1) for size in array.shape) > _MOST:
        raise shape.wrong(f"sizes whose product is at most {_MOST} bytes")
    return array
