"""Writes and parses the files of buffers: strict JSON after a line with its checksum, and arrays of raw bytes.

Files are untrusted: every type, size and name is checked before memory is allocated or another file is opened. An array
is read when a buffer requests it, so that an unused array takes no memory.
"""

from __future__ import annotations

import copy
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
from relive.schema.fields import DTYPES, DTYPES_BY_NAME, dtype_name
from relive.schema.suggestions import NAME_PATTERN
from relive.storage.allocator import available_host_bytes

FORMAT = 1
"""Version of the format of all files."""
CHUNK_BYTES = 1 << 22
"""Bytes per checksum of a file; the last checksum may cover fewer."""
MAX_JSON_BYTES = 1 << 21
"""Maximum bytes of a JSON document: parsed, it takes up to 24 times as much memory."""
MAX_ARRAYS = 1 << 14
"""Maximum number of arrays in a file."""
MAX_FIRST_LINE_BYTES = 64
"""Maximum bytes of the first line of a file, and of the file FORMAT of a folder."""

ARRAY_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}")
"""Pattern of array names, such as `ring.head`."""

_MAX_INTEGER = 1 << 62
_CORRUPT_REMEDY = "Load an older checkpoint, or copy this one again."


# The first line of a file contains the format and the checksum of the rest. The file FORMAT contains the format of a
# folder.


def add_checksum(body: bytes) -> bytes:
    """Prepend a line with the format and the checksum of `body`."""
    return b"recollect %d %08x\n" % (FORMAT, zlib.crc32(body)) + body


def require_first_line(where: str, first_line: bytes, checksum: int, nbytes: int) -> None:
    """Raise unless the first line of a file of `nbytes` bytes has our format and the checksum of the other lines."""
    # The format is checked first, because newer formats may change the rest of the line.
    _require_format(where, int(_match_first_line(where, rb"recollect ([0-9]{1,9}) .*", first_line)[1]))
    expected = int(_match_first_line(where, rb"recollect [0-9]{1,9} ([0-9a-f]{8})", first_line)[1], 16)
    if checksum != expected:
        place = f"{where}, bytes {len(first_line) + 1} to {nbytes}"
        raise CorruptCheckpoint(explain(place, f"the checksum {expected:08x}", f"{checksum:08x}", _CORRUPT_REMEDY))


def _match_first_line(where: str, pattern: bytes, first_line: bytes) -> re.Match[bytes]:
    match = re.fullmatch(pattern, first_line, re.DOTALL)
    if match is None:
        place, start = (
            f"{where}, bytes 0 to {min(len(first_line), MAX_FIRST_LINE_BYTES)}",
            first_line[:MAX_FIRST_LINE_BYTES],
        )
        raise CorruptCheckpoint(explain(place, "relive's first line", repr(start), _CORRUPT_REMEDY))
    return match


def _require_format(where: str, version: int) -> None:
    """Raise unless a file has the format that is written; an IncompatibleCheckpoint if its format is newer."""
    if version > FORMAT:
        remedy = "Load it with a newer version of relive."
        raise IncompatibleCheckpoint(explain(where, f"format {FORMAT} at most", version, remedy))
    if version < FORMAT:
        place = f"{where}, bytes 0 to {MAX_FIRST_LINE_BYTES}"
        raise CorruptCheckpoint(explain(place, f"one of the formats {[FORMAT]}", version, _CORRUPT_REMEDY))


_FOLDER_REMEDIES = {
    "checkpoint": "Pass another folder.",
    "disk memory": "Load the checkpoint into another folder: rl.load(path, device=rl.Memory.disk(folder)).",
}
"""Kinds of folders, each with the remedy if the folder given for it is of the other kind."""


def encode_folder_format(kind: str) -> bytes:
    """Return the contents of the file FORMAT of a folder of this kind: "checkpoint" or "disk memory"."""
    return f"recollect {kind} {FORMAT}\n".encode()


def require_folder_format(contents: bytes, kind: str) -> None:
    """Raise unless the file FORMAT of a folder has these contents: it may be foreign, damaged or too new."""
    match = re.fullmatch(rb"recollect (checkpoint|disk memory) ([0-9]{1,9})\n", contents)
    if match is not None and match[1] != kind.encode():
        raise IncompatibleCheckpoint(
            explain("FORMAT", f"the kind {kind!r}", repr(match[1].decode()), _FOLDER_REMEDIES[kind])
        )
    if match is None:
        place, expected = f"FORMAT, bytes 0 to {len(contents)}", repr(encode_folder_format(kind).decode())
        remedy = "Pass another folder, or copy this one again."
        raise CorruptCheckpoint(explain(place, expected, repr(contents), remedy))
    _require_format("FORMAT", int(match[2]))


def to_json(document: Any) -> bytes:
    """Encode a document as strict JSON in one line."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def from_json(where: str, body: bytes) -> JsonNode:
    """Parse an untrusted document, the inverse of `to_json`."""
    try:
        document = json.loads(
            body, object_pairs_hook=_unique_dict, parse_constant=_refuse_constant, parse_float=_parse_finite_float
        )
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(explain(where, "strict JSON", error, _CORRUPT_REMEDY)) from None
    return JsonNode(where, document)


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return entries


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _parse_finite_float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text}")
    return number


class JsonNode:
    """An untrusted value of a document, with its place for error messages."""

    __slots__ = ("_place", "value")

    def __init__(self, where: str | tuple[JsonNode, str | int], value: Any) -> None:
        self._place, self.value = where, value

    @property
    def where(self) -> str:
        """Place in the document, computed on demand because a document may have a million values."""
        if isinstance(self._place, str):
            return self._place
        outer, key = self._place
        return f"{outer.where}[{key}]" if isinstance(key, int) else f"{outer.where}: {key}"

    def error(self, expected: str) -> CorruptCheckpoint:
        """Return the error for a value that is not `expected`."""
        # `reprlib` visits only the start of a long or deeply nested value.
        got = reprlib.repr(self.value)
        got = got if len(got) <= 80 else f"{got[:77]}…"
        return CorruptCheckpoint(explain(self.where, expected, got, _CORRUPT_REMEDY))

    def entry(self, key: str) -> JsonNode:
        """Return the entry of a JSON object; raise if it is missing."""
        if not isinstance(self.value, dict) or key not in self.value:
            got = sorted(self.value) if isinstance(self.value, dict) else self.value
            raise JsonNode(self.where, got).error(f"an object with {key!r}")
        return JsonNode((self, key), self.value[key])

    def entries(self) -> dict[str, JsonNode]:
        """Return all entries of an object; raise unless every key is a valid name."""
        if not isinstance(self.value, dict) or not all(NAME_PATTERN.fullmatch(key) for key in self.value):
            raise self.error("an object with names as keys")
        return {key: JsonNode((self, key), value) for key, value in self.value.items()}

    def unchecked_dict(self) -> dict[str, Any]:
        """Return a JSON object as a dict, without checking its entries."""
        if not isinstance(self.value, dict):
            raise self.error("an object")
        return self.value

    def items(self, max_items: int = 1 << 20) -> list[JsonNode]:
        """Return the items of a list of at most `max_items` items."""
        if not isinstance(self.value, list) or len(self.value) > max_items:
            raise self.error(f"a list of at most {max_items} items")
        return [JsonNode((self, i), value) for i, value in enumerate(self.value)]

    def exact_items(self, count: int) -> list[JsonNode]:
        """Return the items of a list of exactly `count` items."""
        items = self.items(count)
        if len(items) != count:
            raise self.error(f"a list of {count} items")
        return items

    def integer(self, minimum: int = 0, maximum: int = _MAX_INTEGER) -> int:
        """Return an integer within bounds."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not minimum <= self.value <= maximum:
            raise self.error(f"an integer from {minimum} to {maximum}")
        return self.value

    def number(self) -> float:
        """Return a finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or abs(self.value) >= 1 << 1023:
            raise self.error("a finite number")
        return float(self.value)

    def flag(self) -> bool:
        """Return true or false as a bool."""
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def text(self, pattern: re.Pattern[str] = NAME_PATTERN) -> str:
        """Return a string that matches a pattern."""
        if not isinstance(self.value, str) or not pattern.fullmatch(self.value):
            raise self.error(f"text like {pattern.pattern}")
        return self.value

    def one_of(self, choices: Mapping[str, Any] | tuple[str, ...]) -> str:
        """Return a string that is one of `choices`."""
        if not isinstance(self.value, str) or self.value not in choices:
            raise self.error(f"one of {', '.join(choices)}")
        return self.value

    def none_if_null(self) -> JsonNode | None:
        """Return None for null, else this node."""
        return None if self.value is None else self

    def integers(self, max_items: int = 1 << 20, maximum: int = _MAX_INTEGER) -> tuple[int, ...]:
        """Return a list of at most `max_items` integers from 0 to `maximum`."""
        value = self.value
        if (
            isinstance(value, list)
            and len(value) <= max_items
            and all(type(x) is int and 0 <= x <= maximum for x in value)
        ):
            return tuple(value)
        # A value that fails the fast test is read item by item, which raises an error with the place of the first
        # invalid item.
        return tuple(item.integer(0, maximum) for item in self.items(max_items))

    def shape(self) -> tuple[int, ...]:
        """Return a shape, stored as a list of axis lengths."""
        return self.integers(64)


@dataclass(frozen=True)
class ArrayInfo:
    """Name, dtype and shape of an array in a file. The arrays of a file are stored one after another."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes, without overflow."""
        return self.dtype.itemsize * math.prod(self.shape)


def describe_array(name: str, tensor: torch.Tensor) -> ArrayInfo:
    """Describe a tensor for a file; raise if a file cannot contain it."""
    if not ARRAY_NAME_PATTERN.fullmatch(name):
        remedy = "Rename it in the state() of the sampler."
        raise CheckpointError(explain("save", f"names of arrays like {ARRAY_NAME_PATTERN.pattern}", repr(name), remedy))
    if tensor.dtype not in DTYPES:
        expected, remedy = f"{name} with one of the dtypes {', '.join(DTYPES_BY_NAME)}", "Convert it in state()."
        raise CheckpointError(explain("save", expected, tensor.dtype, remedy))
    return ArrayInfo(name, tensor.dtype, tuple(tensor.shape))


def arrays_to_json(arrays: Iterable[ArrayInfo]) -> list[Any]:
    """Describe arrays as JSON."""
    return [[array.name, dtype_name(array.dtype), list(array.shape)] for array in arrays]


def arrays_from_json(node: JsonNode) -> tuple[ArrayInfo, ...]:
    """Parse untrusted descriptions of arrays, the inverse of `arrays_to_json`."""
    arrays: dict[str, ArrayInfo] = {}
    nodes = node.items(MAX_ARRAYS)
    for name, dtype, shape in (each.exact_items(3) for each in nodes):
        array = ArrayInfo(name.text(ARRAY_NAME_PATTERN), DTYPES_BY_NAME[dtype.one_of(DTYPES_BY_NAME)], shape.shape())
        # Strides are products of sizes and must not overflow, even if another axis is empty.
        if array.dtype.itemsize * math.prod(filter(None, array.shape)) > _MAX_INTEGER:
            raise shape.error(f"sizes whose product is at most {_MAX_INTEGER} bytes")
        arrays[array.name] = array
    if len(arrays) != len(nodes):
        raise node.error("arrays with distinct names")
    return tuple(arrays.values())


_UNCHECKED_BYTES = 1 << 26
"""Arrays of at most this many bytes are read without checking the free memory."""

Arrays = dict[str, torch.Tensor]

ArraySpec = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of an array."""


class SnapshotReader:
    """Reads the untrusted state of a buffer or of one of its parts; verifies each array when it is requested."""

    def __init__(
        self, where: str, specs: Mapping[str, ArraySpec], read: Callable[[str], torch.Tensor], values: JsonNode,
        config: JsonNode,
    ) -> None:  # fmt: skip
        """`specs` has dtype and shape of each array by name, `read(name)` returns an array; messages name `where`."""
        self.values, self.config = values, config
        """State outside the arrays, and config of the whole buffer."""
        self._where, self._specs, self._read = where, specs, read
        self._prefix = ""
        self._unread_names = dict.fromkeys(specs)
        """Names of the arrays that nobody has requested, in the order of the file; all parts share this dict."""
        self.is_moved = False
        """Whether the saved buffer was on another device."""
        self.segments: Mapping[str, tuple[ArrayInfo, ...]] = {}
        """Arrays of each segment: two with the bounds of its rows, then the columns."""

    def require_columns(self, columns: Mapping[str, ArraySpec]) -> None:
        """Raise unless all segments have exactly these columns. Called before memory for the rows is allocated."""
        expected = [(name, *spec) for name, spec in columns.items()]
        for where, arrays in self.segments.items():
            specs = [(array.name, array.dtype, array.shape[1:]) for array in arrays[2:]]
            if specs != expected:
                got = next((spec for spec in specs if spec not in expected), f"{len(specs)} of {len(expected)} columns")
                raise JsonNode(where, got).error("the columns that the manifest declares")

    def part(self, name: str) -> SnapshotReader:
        """Return a reader of the part `name`, with its values and arrays."""
        part = self.part_without_values(name)
        part.values = self.values.entry(name)
        return part

    def part_without_values(self, name: str) -> SnapshotReader:
        """Return a reader of the part `name`, which has arrays but no values."""
        part = copy.copy(self)
        part.values, part._prefix = JsonNode((self.values, name), {}), f"{self._prefix}{name}."
        return part

    def find_spec(self, name: str) -> ArraySpec | None:
        """Return the dtype and shape of an array without reading it; None if it does not exist."""
        return self._specs.get(self._prefix + name)

    def read_verified(self, name: str) -> torch.Tensor:
        """Read an array whose dtype and shape were verified before."""
        self._unread_names.pop(self._prefix + name, None)
        return self._read(self._prefix + name)

    def read_all_arrays(self, max_bytes: int) -> Arrays:
        """Read all arrays of this part; raise if they have more than `max_bytes` together."""
        sizes = {
            name.removeprefix(self._prefix): dtype.itemsize * math.prod(shape)
            for name, (dtype, shape) in self._specs.items()
            if name.startswith(self._prefix)
        }
        if sum(sizes.values()) > max_bytes:
            largest_name = max(sizes, key=lambda name: sizes[name])
            raise self.array_node(largest_name, f"{sizes[largest_name]:,}").error(f"at most {max_bytes:,} bytes")
        return {name: self.read_verified(name) for name in sizes}

    def array_node(self, name: str, got: Any = None) -> JsonNode:
        """Return a node for an error about an array."""
        spec = self.find_spec(name)
        if got is None and spec is not None:
            got = f"{spec[0]} of shape {spec[1]}"
        return JsonNode(f"{self._where}: {self._prefix}{name}", got)

    def require_array(
        self, name: str, shape: tuple[int | range | None, ...], dtype: torch.dtype | None = None, *,
        only_leading: bool = False,
    ) -> None:  # fmt: skip
        """Raise unless an array has this shape and this dtype; the array is not read.

        The length of an axis may be an int, a range of ints, or None for any length; the dtype None means any dtype.
        With `only_leading` the array may have further axes after `shape`.
        """
        spec = self.find_spec(name)
        got = () if spec is None else spec[1][: len(shape)] if only_leading else spec[1]
        if spec is None or len(got) != len(shape) or not all(map(_length_matches, got, shape)):
            lengths = tuple("any" if length is None else length for length in shape)
            raise self.array_node(name).error(f"an array of {'leading ' if only_leading else ''}shape {lengths}")
        if dtype not in (None, spec[0]):
            raise self.array_node(name).error(f"{dtype}")

    def read_array(self, name: str, shape: tuple[int | range | None, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read an array that must have this dtype and shape."""
        self.require_array(name, shape, dtype)
        return self.read_verified(name)

    def read_like(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Read an array that must have the dtype and shape of `like`."""
        return self.read_array(name, tuple(like.shape), like.dtype)

    def copy_arrays_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy arrays into the tensors of the same names."""
        for name, target in targets.items():
            array = self.read_like(name, target)
            if target.is_cpu and target.is_contiguous():
                # numpy copies in one thread; the parallel `copy_` of torch would wait for busy cores.
                writable_memory(target)[:] = writable_memory(array)
            else:
                target.copy_(array)

    def require_all_read(self, part_name: str) -> None:
        """Raise unless every array was requested."""
        if self._unread_names:
            raise self.array_node(next(iter(self._unread_names))).error(f"no other array than those of a {part_name}")


def _length_matches(length: int, expected: int | range | None) -> bool:
    return expected is None or (length in expected if isinstance(expected, range) else length == expected)


def make_snapshot_reader(
    where: str, arrays: Iterable[ArrayInfo], fill: Callable[[int, memoryview], None], values: JsonNode, config: JsonNode
) -> SnapshotReader:
    """Make a reader of the arrays of one file. `fill(offset, target)` copies verified bytes of the file."""
    specs: dict[str, ArraySpec] = {}
    offsets: dict[str, int] = {}
    nbytes = 0
    for array in arrays:
        specs[array.name], offsets[array.name] = (array.dtype, array.shape), nbytes
        nbytes += array.nbytes
    free = available_host_bytes() if nbytes > _UNCHECKED_BYTES else None
    if free is not None and nbytes > free:
        remedy = "Load it where there is more memory."
        raise IncompatibleCheckpoint(explain(where, f"at most {free:,} bytes, the free memory", nbytes, remedy))

    @cache
    def read(name: str) -> torch.Tensor:
        dtype, shape = specs[name]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        fill(offsets[name], writable_memory(tensor))
        require_bool_bytes(tensor, f"{where}: {name}")
        return tensor

    return SnapshotReader(where, specs, read, values, config)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor; a contiguous tensor on the host is not copied."""
    if sys.byteorder != "little":
        remedy = "Save on a little-endian machine."
        raise CheckpointError(explain("save", "a little-endian machine", sys.byteorder, remedy))
    whole = tensor.detach().cpu().contiguous()
    # torch refuses to view bytes if an axis of length one has an unusual stride, so the tensor is flattened first.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def writable_memory(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous tensor on the host."""
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.view(-1).view(torch.uint8).numpy().data


def require_bool_bytes(tensor: torch.Tensor, where: str) -> None:
    """Raise unless every byte of a bool tensor is 0 or 1: kernels misbehave for others."""
    if tensor.dtype != torch.bool or not tensor.numel():
        return
    # numpy computes in one thread; a parallel torch op would wait for busy cores.
    largest = int(tensor.view(torch.uint8).numpy().max())
    if largest > 1:
        raise CorruptCheckpoint(explain(where, "bools of 0 and 1", largest, "Copy it again."))
