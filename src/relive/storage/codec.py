"""Bytes that anybody may have written: strict JSON behind a line with its checksum, and lists of arrays.

One codec for manifests, commits of disk memory, the notes of shards and pickles. Every type, size and name is checked
here, before anything is allocated or opened. An array is read only when a buffer asks for it, once its dtype and shape
are known to be right: what nobody asks for takes no memory.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch

from relive.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, explain
from relive.schema.conversion import clean_bools
from relive.schema.suggestions import NAME
from relive.storage.allocator import available_bytes

FORMAT = 1
"""The format that is written; older ones are read for ever."""
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
class ArrayInfo:
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


def with_checksum(body: bytes) -> bytes:
    """Bytes behind a line with their checksum."""
    return b"recollect %d %08x\n" % (FORMAT, zlib.crc32(body)) + body


def arrays_to_json(arrays: Iterable[ArrayInfo]) -> list[Any]:
    """Arrays as JSON."""
    return [[array.name, array.dtype, list(array.shape)] for array in arrays]


def format_of(where: str, first: bytes) -> int:
    """The format that the first line of a file names. It is asked for before anything else is read."""
    header = re.match(rb"recollect ([0-9]{1,9}) ", first)
    if header is None:
        raise _no_first_line(where, first)
    return int(header[1])


def reader_for(where: str, version: int, readers: Mapping[int, Any]) -> Any:
    """The reader of a format; a format that is newer than all of them is an IncompatibleCheckpoint."""
    if version in readers:
        return readers[version]
    if version > max(readers):
        remedy = "Load it with a newer version of relive."
        raise IncompatibleCheckpoint(explain(where, f"format {max(readers)} at most", version, remedy))
    place = f"{where}, bytes 0 to {_LONGEST_LINE}"
    raise CorruptCheckpoint(explain(place, f"one of the formats {sorted(readers)}", version, _REMEDY))


def without_checksum(where: str, data: bytes) -> bytes:
    """The bytes that `with_checksum` was given."""
    first, _, body = data.partition(b"\n")
    require_first_line(where, first, zlib.crc32(body), len(data))
    return body


def _no_first_line(where: str, first: bytes) -> CorruptCheckpoint:
    place = f"{where}, bytes 0 to {min(len(first), _LONGEST_LINE)}"
    return CorruptCheckpoint(explain(place, "relive's first line", repr(first[:_LONGEST_LINE]), _REMEDY))


def require_first_line(where: str, first: bytes, found: int, nbytes: int) -> None:
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
        document = json.loads(
            body, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(explain(where, "strict JSON", error, _REMEDY)) from None
    return Node(where, document)


_REMEDY = "Load an older checkpoint, or copy this one again."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _finite_float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text}")
    return number


class Node:
    """A value of a document that nobody vouches for, and the place it was found at."""

    __slots__ = ("_at", "value")

    def __init__(self, where: str | tuple[Node, str | int], value: Any) -> None:
        self._at, self.value = where, value

    @property
    def where(self) -> str:
        """Put together when it is asked for: a document may have a million values."""
        if isinstance(self._at, str):
            return self._at
        outer, key = self._at
        return f"{outer.where}[{key}]" if isinstance(key, int) else f"{outer.where}: {key}"

    def error(self, expected: str) -> CorruptCheckpoint:
        """The error that says what should have been here."""
        got = reprlib.repr(self.value)  # however deep and long it is
        return CorruptCheckpoint(explain(self.where, expected, got if len(got) <= 80 else f"{got[:77]}…", _REMEDY))

    def entry(self, key: str) -> Node:
        """An entry of an object."""
        if not isinstance(self.value, dict) or key not in self.value:
            raise Node(self.where, sorted(self.value) if isinstance(self.value, dict) else self.value).error(
                f"an object with {key!r}"
            )
        return Node((self, key), self.value[key])

    def entries(self) -> dict[str, Node]:
        """All entries of an object whose keys are names."""
        if not isinstance(self.value, dict) or not all(NAME.fullmatch(key) for key in self.value):
            raise self.error("an object with names as keys")
        return {key: Node((self, key), value) for key, value in self.value.items()}

    def mapping(self) -> dict[str, Any]:
        """An object, whatever is in it."""
        if not isinstance(self.value, dict):
            raise self.error("an object")
        return self.value

    def items(self, most: int = 1 << 20) -> list[Node]:
        """The items of a list."""
        if not isinstance(self.value, list) or len(self.value) > most:
            raise self.error(f"a list of at most {most} items")
        return [Node((self, i), value) for i, value in enumerate(self.value)]

    def parts(self, count: int) -> list[Node]:
        """The items of a list that has just so many."""
        found = self.items(count)
        if len(found) != count:
            raise self.error(f"a list of {count} items")
        return found

    def integer(self, least: int = 0, most: int = _MOST) -> int:
        """A whole number within bounds."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value <= most:
            raise self.error(f"an integer from {least} to {most}")
        return self.value

    def number(self) -> float:
        """A finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or abs(self.value) >= 1 << 1023:
            raise self.error("a finite number")
        return float(self.value)

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def text(self, pattern: re.Pattern[str] = NAME) -> str:
        """A string of this pattern."""
        if not isinstance(self.value, str) or not pattern.fullmatch(self.value):
            raise self.error(f"text like {pattern.pattern}")
        return self.value

    def one_of(self, known: Mapping[str, Any] | tuple[str, ...]) -> str:
        """One of some words."""
        if not isinstance(self.value, str) or self.value not in known:
            raise self.error(f"one of {', '.join(known)}")
        return self.value

    def optional(self) -> Node | None:
        """Itself, or None for null."""
        return None if self.value is None else self

    def integers(self, count: int = 1 << 20, most: int = _MOST) -> tuple[int, ...]:
        """A list of at most `count` whole numbers."""
        value = self.value
        if isinstance(value, list) and len(value) <= count and all(type(x) is int and 0 <= x <= most for x in value):
            return tuple(value)
        return tuple(item.integer(0, most) for item in self.items(count))  # which says what is wrong

    def shape(self) -> tuple[int, ...]:
        """Sizes of axes."""
        return self.integers(64)


def arrays_from_json(node: Node) -> tuple[ArrayInfo, ...]:
    """The arrays that `arrays_to_json` was given."""
    arrays = tuple(_array_from_json(array) for array in node.items(MOST_ARRAYS))
    if len({array.name for array in arrays}) != len(arrays):
        raise node.error("arrays with distinct names")
    return arrays


def _array_from_json(node: Node) -> ArrayInfo:
    name, dtype, shape = node.parts(3)
    array = ArrayInfo(name.text(ARRAY_NAME), dtype.one_of(ITEM_BYTES), shape.shape())
    # Strides are products of sizes too, also where another axis is empty.
    if ITEM_BYTES[array.dtype] * math.prod(filter(None, array.shape)) > _MOST:
        raise shape.error(f"sizes whose product is at most {_MOST} bytes")
    return array


# Arrays

_MUCH = 1 << 26
"""Bytes of arrays that are read without a look at the free memory."""

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Arrays = dict[str, torch.Tensor]

Form = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of an array."""


class ArraySource:
    """Arrays by name, each of which is read when it is asked for."""

    def __init__(self, where: str, forms: Mapping[str, Form], read: Callable[[str], torch.Tensor]) -> None:
        self.where, self._forms, self._read = where, forms, read
        self._asked: set[str] = set()

    @property
    def unread(self) -> list[str]:
        """The names of arrays that were not read."""
        return [name for name in self._forms if name not in self._asked]

    def form(self, name: str) -> Form | None:
        """The dtype and shape of an array, which is not read for it; None if there is none of this name."""
        return self._forms.get(name)

    def sizes(self, prefix: str) -> dict[str, int]:
        """The bytes of each array whose name begins so."""
        forms = {name: form for name, form in self._forms.items() if name.startswith(prefix)}
        return {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in forms.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        self._asked.add(name)
        return self._read(name)


def arrays_in_memory(where: str, tensors: Mapping[str, torch.Tensor]) -> ArraySource:
    """Tensors that a caller has in memory, as a source of copies."""
    for name, x in tensors.items():
        is_plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type != "meta"
        if not isinstance(name, str) or not is_plain:
            got = f"{x.layout} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise Node(f"{where}: {name}", got).error("a dense tensor with values")

    def read(name: str) -> torch.Tensor:
        return clean_bools(tensors[name].detach().clone(memory_format=torch.contiguous_format))

    return ArraySource(where, {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}, read)


def arrays_in_file(where: str, arrays: Iterable[ArrayInfo], fill: Callable[[int, memoryview], None]) -> ArraySource:
    """The arrays of one file. `fill(offset, target)` copies bytes of it whose checksum was found right."""
    forms: dict[str, Form] = {}
    offsets: dict[str, int] = {}
    nbytes = 0
    for array in arrays:
        forms[array.name], offsets[array.name] = (DTYPES[array.dtype], array.shape), nbytes
        nbytes += array.nbytes
    free = available_bytes() if nbytes > _MUCH else None
    if free is not None and nbytes > free:
        remedy = "Load it where there is more memory."
        raise IncompatibleCheckpoint(explain(where, f"at most {free:,} bytes, the free memory", nbytes, remedy))

    @cache
    def read(name: str) -> torch.Tensor:
        dtype, shape = forms[name]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        fill(offsets[name], memory_of(tensor))
        require_flags(tensor, f"{where}: {name}")
        return tensor

    return ArraySource(where, forms, read)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files."""
    return _NAMES[dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, its own memory where that is the host's and in one piece."""
    if sys.byteorder != "little":
        raise CheckpointError(
            explain("save", "a little-endian machine", sys.byteorder, "Save on a little-endian machine.")
        )
    whole = tensor.detach().cpu().contiguous()
    # An axis of length one may have any stride, which a view of bytes minds: say that memory is in one piece.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def array_info(name: str, tensor: torch.Tensor) -> ArrayInfo:
    """How a file describes a tensor."""
    if not ARRAY_NAME.fullmatch(name):
        remedy = "Rename it in the state() of the sampler."
        raise CheckpointError(explain("save", f"names of arrays like {ARRAY_NAME.pattern}", repr(name), remedy))
    return ArrayInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host, to be written."""
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.view(-1).view(torch.uint8).numpy().data


def require_flags(tensor: torch.Tensor, where: str) -> None:
    """A byte that is neither 0 nor 1 is no bool, and kernels may do anything with it."""
    if tensor.dtype != torch.bool or not tensor.numel():
        return
    largest = int(tensor.view(torch.uint8).numpy().max())  # of numpy: a parallel operation waits for busy cores
    if largest > 1:
        raise CorruptCheckpoint(explain(where, "bools of 0 and 1", largest, "Copy it again."))
