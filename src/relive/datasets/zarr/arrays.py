"""Arrays of a zarr store, of format 2 and 3: every claim is checked before a chunk is decoded."""

from __future__ import annotations

import itertools
import math
import re
import reprlib
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from relive.datasets.installed import required
from relive.datasets.metadata import MOST_BYTES, damage_named, parsed, sizes, wrong
from relive.datasets.zarr.store import Store
from relive.errors import SchemaError, explain
from relive.memory.space import available_bytes

_LARGEST_CHUNK = 1 << 30
_MOST_CHUNKS = 1 << 20
_V2_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16)")
_V3_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_CODECS = ("blosc", "zstd", "lz4", "zlib", "gzip")
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Form(NamedTuple):
    """What the metadata of an array say."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    fill: Any
    order: str
    codec: dict[str, Any] | None
    """How chunks are compressed, as numcodecs says it."""
    key: Callable[[tuple[int, ...]], str]
    """The name of a chunk."""


class ZarrArray:
    """One array of a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self.where = store, name, f"{store.name}: {name}"
        form_of = _form_2 if f"{name}/.zarray" in store.sizes else _form_3
        self.form = form_of(self.where, store, name)
        self._grid = tuple(-(-size // chunk) for size, chunk in zip(self.form.shape, self.form.chunks, strict=True))
        self._nbytes = math.prod(self.form.chunks) * self.form.dtype.itemsize
        free = available_bytes() or _LARGEST_CHUNK
        if self._nbytes > min(_LARGEST_CHUNK, free):
            raise wrong(self.where, f"chunks of at most {min(_LARGEST_CHUNK, free):,} bytes", f"{self._nbytes:,}")
        if math.prod(self._grid) > _MOST_CHUNKS + 64 * len(store.sizes):
            raise wrong(self.where, "chunks that are stored", f"{math.prod(self._grid):,} chunks")
        self._band: tuple[int, np.ndarray] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is stored: one that is not holds the fill value everywhere."""
        at = itertools.product(*map(range, self._grid))
        return math.prod(self._grid) <= len(self._store.sizes) and all(self._key(i) in self._store.sizes for i in at)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows from start to stop, in the byte order of this machine."""
        length = self.form.chunks[0]
        rows = np.empty((stop - start, *self.form.shape[1:]), self.form.dtype.newbyteorder("="))
        for number in range(start // length, -(-stop // length)):
            first = max(start, number * length)
            last = min(stop, (number + 1) * length)
            band = self._chunk_rows(number)
            rows[first - start : last - start] = band[first - number * length : last - number * length]
        return rows

    def _chunk_rows(self, number: int) -> np.ndarray:
        """The rows of all chunks with this first coordinate; the last ones read are kept."""
        if self._band is None or self._band[0] != number:
            band = np.empty((self.form.chunks[0], *self.form.shape[1:]), self.form.dtype)
            for inner in itertools.product(*map(range, self._grid[1:])):
                lows = [i * chunk for i, chunk in zip(inner, self.form.chunks[1:], strict=True)]
                place = tuple(slice(low, low + chunk) for low, chunk in zip(lows, self.form.chunks[1:], strict=True))
                part = band[(slice(None), *place)]
                part[...] = self._chunk((number, *inner))[tuple(slice(size) for size in part.shape)]
            self._band = number, band
        return self._band[1]

    def _key(self, at: tuple[int, ...]) -> str:
        return f"{self._name}/{self.form.key(at)}"

    def _chunk(self, at: tuple[int, ...]) -> np.ndarray:
        key = self._key(at)
        if key not in self._store.sizes:
            return np.full(self.form.chunks, self.form.fill, self.form.dtype)
        # What cannot be compressed grows a little.
        body = self._store.read(key, self._nbytes + self._nbytes // 8 + 4096)
        decoded = _decoded(f"{self._store.name}: {key}", self.form.codec, body, self._nbytes)
        return np.frombuffer(decoded, self.form.dtype).reshape(self.form.chunks, order=self.form.order)  # type: ignore[arg-type]


def _decoded(where: str, codec: dict[str, Any] | None, body: bytes, nbytes: int) -> Any:
    """The bytes of a chunk; raises, before anything is allocated, unless there are `nbytes` of them."""
    kind = None if codec is None else codec["id"]
    with damage_named(where, f"bytes that {kind} wrote"):
        if kind in ("zlib", "gzip"):
            found = zlib.decompressobj(wbits=47).decompress(body, nbytes + 1)
            claimed = len(found)
        else:
            claimed = len(body) if kind is None else _claimed(kind, body)
            found = body
        if claimed != nbytes:
            raise wrong(where, f"{nbytes:,} bytes", f"{claimed:,}")
        if kind is None or kind in ("zlib", "gzip"):
            return found
        out = np.zeros(nbytes, np.uint8)
        required("numcodecs", "zarr").get_codec(codec).decode(body, out=out)
        return out


def _claimed(kind: str, body: bytes) -> int:
    """How many bytes a compressed chunk says it has."""
    if kind == "blosc":
        return struct.unpack_from("<I", body, 4)[0]
    if kind == "lz4":
        return struct.unpack_from("<I", body)[0]
    magic, head = struct.unpack_from("<IB", body)
    if magic != 0xFD2FB528:
        raise ValueError(f"the magic number {magic:08x}")
    single, dictionary = (head >> 5) & 1, (0, 1, 2, 4)[head & 3]
    width = (single, 2, 4, 8)[head >> 6]
    field = body[5 + (1 - single) + dictionary :][:width]
    if not width or len(field) < width:
        raise ValueError("a frame without its size")
    return int.from_bytes(field, "little") + (256 if width == 2 else 0)


def _form_2(where: str, store: Store, name: str) -> Form:
    about = parsed(f"{where}/.zarray", store.read(f"{name}/.zarray", MOST_BYTES))
    dtype, order, filters = (about.get(key) for key in ("dtype", "order", "filters"))
    if not isinstance(dtype, str) or not _V2_DTYPE.fullmatch(dtype):
        raise wrong(where, "a dtype of numbers", reprlib.repr(dtype))
    if order not in ("C", "F") or filters:
        raise wrong(where, "order C or F, and no filters", f"order {order!r}, filters {reprlib.repr(filters)}")
    separator = about.get("dimension_separator", ".")
    codec = about.get("compressor")
    if codec is not None:
        codec = _codec(where, codec.get("id") if isinstance(codec, dict) else codec)
    shape, chunks = _extents(where, about.get("shape"), about.get("chunks"))
    fill = _fill(where, about.get("fill_value"), np.dtype(dtype))
    return Form(shape, np.dtype(dtype), chunks, fill, order, codec, _keys(where, separator, ""))


def _form_3(where: str, store: Store, name: str) -> Form:
    about = parsed(f"{where}/zarr.json", store.read(f"{name}/zarr.json", MOST_BYTES))
    dtype = about.get("data_type")
    if not isinstance(dtype, str) or not _V3_DTYPE.fullmatch(dtype):
        raise wrong(where, "a dtype of numbers", reprlib.repr(dtype))
    grid, encoding = (_named(where, about, key) for key in ("chunk_grid", "chunk_key_encoding"))
    if grid[0] != "regular" or encoding[0] not in ("default", "v2") or about.get("storage_transformers"):
        raise wrong(where, "a regular grid of chunks", f"{grid[0]!r}, {encoding[0]!r}")
    first, *rest = _pipeline(where, about.get("codecs"))
    if first[0] != "bytes" or len(rest) > 1:
        got = ", ".join(repr(codec) for codec, _ in (first, *rest))
        raise SchemaError(
            explain(where, "the codec 'bytes' and one compressor", got, "Write it without sharding or transposing.")
        )
    is_default = encoding[0] == "default"
    separator = encoding[1].get("separator", "/" if is_default else ".")
    order = ">" if first[1].get("endian") == "big" else "<"
    kind = np.dtype(dtype).newbyteorder(order)
    shape, chunks = _extents(where, about.get("shape"), grid[1].get("chunk_shape"))
    codec = _codec(where, rest[0][0]) if rest else None
    fill = _fill(where, about.get("fill_value"), kind)
    return Form(shape, kind, chunks, fill, "C", codec, _keys(where, separator, f"c{separator}" if is_default else ""))


def _pipeline(where: str, codecs: Any) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(codecs, list) or not 1 <= len(codecs) <= 8:
        raise wrong(where, "a list of codecs", reprlib.repr(codecs))
    return [_named(where, {"codec": codec}, "codec") for codec in codecs]


def _named(where: str, about: dict[str, Any], key: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of an extension point of format 3."""
    found = about.get(key)
    if isinstance(found, dict) and isinstance(found.get("name"), str):
        settings = found.get("configuration", {})
        if isinstance(settings, dict):
            return found["name"], settings
    raise wrong(where, f"{key} with a name", reprlib.repr(found))


def _codec(where: str, name: Any) -> dict[str, Any]:
    """What decodes; settings of the compressor are no matter, they are in its bytes."""
    if name not in _CODECS:
        raise wrong(where, f"one of the compressors {', '.join(_CODECS)}", reprlib.repr(name))
    return {"id": name}


def _extents(where: str, shape: Any, chunks: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    extents = sizes(f"{where}: shape", shape), sizes(f"{where}: chunks", chunks, 1)
    if len(extents[0]) != len(extents[1]) or not extents[0]:
        raise wrong(where, "an axis of steps, and chunks for every axis", f"shape {shape}, chunks {chunks}")
    return extents


def _keys(where: str, separator: Any, prefix: str) -> Callable[[tuple[int, ...]], str]:
    if separator not in (".", "/"):
        raise wrong(where, "a separator . or /", reprlib.repr(separator))
    return lambda at: prefix + separator.join(map(str, at))


def _fill(where: str, value: Any, dtype: np.dtype) -> Any:
    value = 0 if value is None else _NUMBERS.get(value, value) if isinstance(value, str) else value
    try:
        with np.errstate(all="ignore"):
            return np.array(complex(*value) if isinstance(value, list) else value).astype(dtype, casting="unsafe")
    except (TypeError, ValueError, OverflowError):
        raise wrong(where, "a number as fill value", reprlib.repr(value)) from None
