"""Arrays of a zarr store, of format 2 and 3: every claim is checked before a chunk is decoded."""

from __future__ import annotations

import itertools
import math
import re
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from relive.datasets.metadata import MOST_BYTES, parsed, part_of_budget, sizes, wrong
from relive.datasets.zarr.codecs import CODECS, decode
from relive.datasets.zarr.store import Store
from relive.errors import SchemaError, explain

_LARGEST_CHUNK = 1 << 30
_MOST_CHUNKS = 1 << 20
_V2_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16)")
_V3_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Form(NamedTuple):
    """What the metadata of an array say."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    fill: Any
    order: str
    codec: str | None
    """The compressor of its chunks."""
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
        if math.prod(self._grid) > _MOST_CHUNKS + 64 * len(store.sizes):
            raise wrong(self.where, "chunks that are stored", f"{math.prod(self._grid):,} chunks")
        needed = self._nbytes + (0 if self._is_one_wide else self._band_bytes)
        most = min(_LARGEST_CHUNK, part_of_budget(store.nbytes))
        if needed > most:
            raise wrong(self.where, f"chunks of at most {most:,} bytes, in a store of {store.nbytes:,}", f"{needed:,}")

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is stored: one that is not holds the fill value everywhere."""
        at = itertools.product(*map(range, self._grid))
        return math.prod(self._grid) <= len(self._store.sizes) and all(self._key(i) in self._store.sizes for i in at)

    @property
    def _is_one_wide(self) -> bool:
        """Whether all rows are whole in one chunk."""
        return math.prod(self._grid[1:]) == 1

    @property
    def _band_bytes(self) -> int:
        """How many bytes the rows of all chunks with one first coordinate have."""
        length = min(self.form.chunks[0], self.form.shape[0])
        return length * math.prod(self.form.shape[1:]) * self.form.dtype.itemsize

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
        if self._is_one_wide:
            nbytes, make = self._nbytes, lambda: self._chunk((number, *(0 for _ in self._grid[1:])))
        else:
            nbytes, make = self._band_bytes, lambda: self._band(number)
        return self._store.kept.get(self._name, number, nbytes, make)

    def _band(self, number: int) -> np.ndarray:
        length = min(self.form.chunks[0], self.form.shape[0])
        band = np.empty((length, *self.form.shape[1:]), self.form.dtype)
        for inner in itertools.product(*map(range, self._grid[1:])):
            lows = [i * chunk for i, chunk in zip(inner, self.form.chunks[1:], strict=True)]
            place = tuple(slice(low, low + chunk) for low, chunk in zip(lows, self.form.chunks[1:], strict=True))
            part = band[(slice(None), *place)]
            part[...] = self._chunk((number, *inner))[tuple(slice(size) for size in part.shape)]
        return band

    def _key(self, at: tuple[int, ...]) -> str:
        return f"{self._name}/{self.form.key(at)}"

    def _chunk(self, at: tuple[int, ...]) -> np.ndarray:
        """A chunk as far as it lies in the array."""
        key, inside = self._key(at), tuple(map(slice, self.form.shape))
        if key not in self._store.sizes:
            extent = tuple(map(min, self.form.chunks, self.form.shape))
            return np.broadcast_to(self.form.fill, extent)
        # What cannot be compressed grows a little.
        body = self._store.read(key, self._nbytes + self._nbytes // 8 + 4096)
        decoded = decode(f"{self._store.name}: {key}", self.form.codec, body, self._nbytes)
        return decoded.view(self.form.dtype).reshape(self.form.chunks, order=self.form.order)[inside]  # type: ignore[arg-type]


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


def _codec(where: str, name: Any) -> str:
    """The compressor; its settings do not matter, they are in its bytes."""
    if name not in CODECS:
        raise wrong(where, f"one of the compressors {', '.join(CODECS)}", reprlib.repr(name))
    return name


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
