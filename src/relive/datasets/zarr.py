"""Zarr stores in diffusion policy's layout: read block by block into any buffer, and written from a replay buffer."""

from __future__ import annotations

import itertools
import math
import os
import re
import reprlib
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from relive.datasets.files import (
    MAX_JSON_BYTES,
    compute_decoding_limit,
    convert_errors,
    dataset_error,
    import_extra,
    parse_json,
    parse_sizes,
    read_episode_arrays,
    require_time_order,
    write_atomically,
)
from relive.datasets.filling import (
    STEP_FIELDS,
    Columns,
    ColumnSpec,
    FinalObs,
    RowSource,
    fill_from_rows,
    slice_leaves,
)
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.schema.checks import check_nonempty
from relive.schema.fields import Path as FieldPath
from relive.schema.fields import iter_leaves
from relive.storage import Memory
from relive.storage.codec import to_json

_MAX_FILES = 1 << 22
_MAX_DEPTH = 16


class ZarrStore:
    """The files of a store by name ("data/img/0.0.0.0").

    Args:
        name: the name of the store, for error messages.
        nbytes: the number of bytes of the store on the disk.
        sizes: the size of each file.
        read_file: a function that reads a file, given its name and size.
    """

    def __init__(self, name: str, nbytes: int, sizes: dict[str, int], read_file: Callable[[str, int], bytes]) -> None:
        self.name, self.nbytes, self.sizes, self._read_file = name, nbytes, sizes, read_file
        self._bands: dict[str, tuple[int, int, np.ndarray]] = {}
        """For each array: the number, the bytes and the rows of the last band that `ZarrArray` has read."""

    def read_file(self, name: str, max_bytes: int) -> bytes:
        """Read a whole file; raise if it is longer than `max_bytes`."""
        where = f"{self.name}: {name}"
        if self.sizes[name] > max_bytes:
            raise dataset_error(where, f"at most {max_bytes:,} bytes", f"{self.sizes[name]:,}")
        with convert_errors(where, "a file that can be read"):
            body = self._read_file(name, self.sizes[name])
        if len(body) != self.sizes[name]:
            raise dataset_error(where, f"{self.sizes[name]} bytes", len(body))
        return body

    def get_band(self, array_name: str, number: int, nbytes: int, read_band: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a band of `nbytes` bytes of an array, cached or from `read_band`."""
        last_number, _, rows = self._bands.get(array_name, (-1, 0, None))
        if last_number == number and rows is not None:
            return rows
        self._bands.pop(array_name, None)
        if nbytes + sum(band_bytes for _, band_bytes, _ in self._bands.values()) > compute_decoding_limit(self.nbytes):
            self._bands.clear()
        rows = read_band()
        self._bands[array_name] = number, nbytes, rows
        return rows


@contextmanager
def open_store(path: Path) -> Iterator[ZarrStore]:
    """Open the store in a folder or .zip."""

    def read_file(name: str, nbytes: int) -> bytes:
        with open(os.open(path / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            return file.read(nbytes + 1)

    def read_entry(name: str, nbytes: int) -> bytes:
        # The entry is read as a stream, because `archive.read` would inflate up to 2 GiB before it checks the size.
        with archive.open(name) as file:
            return file.read(nbytes) + file.read(1)

    if path.is_dir():
        sizes = dict(_list_folder_files(path, path.name, "", 0))
        yield ZarrStore(path.name, sum(sizes.values()), sizes, read_file)
        return
    with convert_errors(str(path), "a folder or a .zip with a zarr store"):
        archive, nbytes = zipfile.ZipFile(path), path.stat().st_size
    with archive:
        yield ZarrStore(path.name, nbytes, dict(_list_zip_files(path.name, archive)), read_entry)


def _list_folder_files(folder: Path, store_name: str, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    """Yield (name, size) of all files below a folder; raise for links, devices and pipes."""
    if depth > _MAX_DEPTH:
        raise dataset_error(f"{store_name}: {prefix}", f"at most {_MAX_DEPTH} folders inside each other", "more")
    with os.scandir(folder) as entries:
        files = list(islice(entries, _MAX_FILES + 1))
    if len(files) > _MAX_FILES:
        raise dataset_error(f"{store_name}: {prefix}", f"at most {_MAX_FILES} files", "more")
    for entry in files:
        name = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _list_folder_files(folder / entry.name, store_name, f"{name}/", depth + 1)
        elif entry.is_file(follow_symlinks=False):
            yield name, entry.stat(follow_symlinks=False).st_size
        else:
            kind = "a link" if entry.is_symlink() else "a device or pipe"
            raise dataset_error(f"{store_name}: {name}", "a regular file", kind)


def _list_zip_files(store_name: str, archive: zipfile.ZipFile) -> Iterator[tuple[str, int]]:
    """Yield (name, decoded size) of all files in a .zip."""
    entries = archive.infolist()
    if len(entries) > _MAX_FILES or len(set(archive.namelist())) != len(entries):
        raise dataset_error(store_name, f"at most {_MAX_FILES} files with distinct names", len(entries))
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            where, expected = f"{store_name}: {entry.filename}", "an entry that is stored or deflated"
            raise dataset_error(where, expected, entry.compress_type)
        if not entry.is_dir():
            yield entry.filename, entry.file_size


CODECS = ("blosc", "lz4", "zstd", "zlib", "gzip")
"""The supported compressors."""
_ZLIB_WINDOWS = {"zlib": 15, "gzip": 31}

_BLOSC_HEADER = struct.Struct("<4B3I")
_BLOSC_COPY_FLAG, _BLOSC_UNSPLIT_FLAG = 0x02, 0x10
_BLOSC_COMPRESSORS = {0: "blosclz", 1: "lz4", 3: "zlib", 4: "zstd"}
_MAX_BLOSC_SPLITS, _MIN_BLOSC_SPLIT = 16, 128


def decode_chunk(where: str, codec: str | None, body: Any, decoded_bytes: int) -> np.ndarray:
    """Decode a chunk of `decoded_bytes` bytes; raise before allocating memory if the chunk has another size.

    Args:
        where: the name of the chunk, for error messages.
        codec: the compressor; None if the chunk is not compressed.
        body: the bytes of the file.
        decoded_bytes: the decoded size that the array declares.
    """
    with convert_errors(where, f"bytes that {codec} wrote"):
        if codec is None:
            _require_decoded_size(where, len(body), decoded_bytes)
            return np.frombuffer(body, np.uint8)
        if codec in _ZLIB_WINDOWS:
            stream = zlib.decompressobj(_ZLIB_WINDOWS[codec])
            decoded = stream.decompress(body, decoded_bytes + 1)
            if len(decoded) <= decoded_bytes and (not stream.eof or stream.unused_data):
                raise ValueError("bytes after the end of the stream" if stream.eof else "a stream without its end")
            _require_decoded_size(where, len(decoded), decoded_bytes)
            return np.frombuffer(decoded, np.uint8)
        _require_decoded_size(where, _read_decoded_size(codec, body), decoded_bytes)
        if codec == "blosc":
            _require_valid_blosc(body)
        out = np.zeros(decoded_bytes, np.uint8)
        import_extra("numcodecs", "zarr").get_codec({"id": codec}).decode(body, out=out)
        return out


def _require_decoded_size(where: str, decoded_bytes: int, expected_bytes: int) -> None:
    if decoded_bytes != expected_bytes:
        raise dataset_error(where, f"{expected_bytes:,} bytes", f"{decoded_bytes:,}")


def _read_decoded_size(codec: str, body: Any) -> int:
    """Return the decoded size in the header of a chunk of blosc, lz4 or zstd."""
    if codec == "blosc":
        return _BLOSC_HEADER.unpack_from(body)[4]
    if codec == "lz4":
        return struct.unpack_from("<I", body)[0]
    magic, descriptor = struct.unpack_from("<IB", body)
    if magic != 0xFD2FB528:
        raise ValueError(f"the magic number {magic:08x}")
    is_single_segment, dictionary_bytes = (descriptor >> 5) & 1, (0, 1, 2, 4)[descriptor & 3]
    width = (is_single_segment, 2, 4, 8)[descriptor >> 6]
    size = bytes(body[5 + (1 - is_single_segment) + dictionary_bytes :][:width])
    if not width or len(size) < width:
        raise ValueError("a frame without its size")
    # zstd subtracts 256 from a size that it stores in two bytes, so 256 is added again.
    return int.from_bytes(size, "little") + (256 if width == 2 else 0)


def _require_valid_blosc(body: Any) -> None:
    """Raise unless the lengths and offsets in a blosc chunk agree with its bytes.

    c-blosc does not get the length of the body: it trusts the header, and older versions trust the offsets too.
    """
    version, _, flags, typesize, nbytes, blocksize, length = _BLOSC_HEADER.unpack_from(body)
    if length != len(body):
        raise ValueError(f"a header that says {length:,} bytes, in a file of {len(body):,}")
    if version != 2 or flags & 0x08:
        raise ValueError(f"the version {version} and the flags {flags:#04x}")
    # If the item size did not divide a block, c-blosc would fill the block's end from uninitialised memory.
    if not typesize or not 0 < blocksize <= nbytes or (blocksize > typesize and blocksize % typesize):
        raise ValueError(f"blocks of {blocksize:,} bytes, of items of {typesize}, in a chunk of {nbytes:,}")
    if flags & _BLOSC_COPY_FLAG:
        if length != nbytes + _BLOSC_HEADER.size:
            raise ValueError(f"{length:,} bytes for a copy of {nbytes:,}")
        return
    if flags >> 5 not in _BLOSC_COMPRESSORS:
        raise ValueError(f"the compressor {flags >> 5}")
    num_blocks, has_short_block = -(-nbytes // blocksize), nbytes % blocksize > 0
    data_start = _BLOSC_HEADER.size + 4 * num_blocks
    if data_start > len(body):
        raise ValueError(f"{num_blocks:,} blocks in {len(body):,} bytes")
    # c-blosc splits a full block of small items into one part per byte of an item; each part begins with its length.
    is_split = (
        not flags & _BLOSC_UNSPLIT_FLAG and typesize <= _MAX_BLOSC_SPLITS and blocksize // typesize >= _MIN_BLOSC_SPLIT
    )
    for block, position in enumerate(struct.unpack_from(f"<{num_blocks}i", body, _BLOSC_HEADER.size)):
        for _ in range(typesize if is_split and not (has_short_block and block == num_blocks - 1) else 1):
            if not data_start <= position <= len(body) - 4:
                raise ValueError(f"block {block} at byte {position:,} of {len(body):,}")
            size = struct.unpack_from("<i", body, position)[0]
            position += 4 + size  # noqa: PLW2901
            if size < 0 or position > len(body):
                raise ValueError(f"{size:,} bytes in block {block}, which ends after byte {len(body):,}")


_MAX_CHUNK_BYTES = 1 << 30
_MAX_CHUNKS = 1 << 20
_V2_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16)")
_V3_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_SPECIAL_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class ArrayMetadata(NamedTuple):
    """The description of an array in its metadata."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    """Shape of a chunk."""
    fill_value: Any
    order: str
    """ "C" or "F", the order of the numbers in a chunk."""
    codec: str | None
    """The compressor of the chunks; None if they are not compressed."""
    chunk_prefix: str
    separator: str

    def format_chunk_name(self, coordinates: tuple[int, ...]) -> str:
        """Return the file name of a chunk, given its coordinates in the grid of chunks."""
        return self.chunk_prefix + self.separator.join(map(str, coordinates))


class ZarrArray:
    """An array of a store, read in bands: the rows of all chunks with the same first coordinate."""

    def __init__(self, store: ZarrStore, name: str) -> None:
        self._store, self._name, self.where = store, name, f"{store.name}: {name}"
        self.spec = _read_array_metadata(self.where, store, name)
        shape, chunks, itemsize = self.spec.shape, self.spec.chunks, self.spec.dtype.itemsize
        self._grid = tuple(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
        """Number of chunks along each axis."""
        if math.prod(self._grid) > _MAX_CHUNKS + 64 * len(store.sizes):
            raise dataset_error(self.where, "chunks that are stored", f"{math.prod(self._grid):,} chunks")
        self._chunk_bytes = math.prod(chunks) * itemsize
        self._has_one_chunk_per_band = math.prod(self._grid[1:]) == 1
        self._band_bytes = min(chunks[0], shape[0]) * math.prod(shape[1:]) * itemsize
        needed_bytes = self._chunk_bytes + (0 if self._has_one_chunk_per_band else self._band_bytes)
        max_bytes = min(_MAX_CHUNK_BYTES, compute_decoding_limit(store.nbytes))
        if needed_bytes > max_bytes:
            expected = f"chunks of at most {max_bytes:,} bytes, in a store of {store.nbytes:,}"
            raise dataset_error(self.where, expected, f"{needed_bytes:,}")

    @property
    def has_all_chunks(self) -> bool:
        """Whether all chunks are stored; rows of missing chunks have the fill value."""
        return math.prod(self._grid) <= len(self._store.sizes) and all(
            f"{self._name}/{self.spec.format_chunk_name(coordinates)}" in self._store.sizes
            for coordinates in itertools.product(*map(range, self._grid))
        )

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Read the rows from start to stop, in the byte order of this machine."""
        length = self.spec.chunks[0]
        nbytes = self._chunk_bytes if self._has_one_chunk_per_band else self._band_bytes
        rows = np.empty((stop - start, *self.spec.shape[1:]), self.spec.dtype.newbyteorder("="))
        for number in range(start // length, -(-stop // length)):
            band_start = number * length
            first, last = max(start, band_start), min(stop, band_start + length)
            band = self._store.get_band(self._name, number, nbytes, lambda number=number: self._read_band(number))
            rows[first - start : last - start] = band[first - band_start : last - band_start]
        return rows

    def _read_band(self, number: int) -> np.ndarray:
        if self._has_one_chunk_per_band:
            return self._read_chunk((number, *(0 for _ in self._grid[1:])))
        band = np.empty((min(self.spec.chunks[0], self.spec.shape[0]), *self.spec.shape[1:]), self.spec.dtype)
        for coordinates in itertools.product(*map(range, self._grid[1:])):
            starts = [i * chunk for i, chunk in zip(coordinates, self.spec.chunks[1:], strict=True)]
            place = tuple(slice(low, low + chunk) for low, chunk in zip(starts, self.spec.chunks[1:], strict=True))
            part = band[(slice(None), *place)]
            part[...] = self._read_chunk((number, *coordinates))[tuple(slice(size) for size in part.shape)]
        return band

    def _read_chunk(self, coordinates: tuple[int, ...]) -> np.ndarray:
        """Read a chunk, without the rows and columns that lie outside the array."""
        shape, dtype, chunks, fill_value, order, codec, *_ = self.spec
        file = f"{self._name}/{self.spec.format_chunk_name(coordinates)}"
        if file not in self._store.sizes:
            return np.broadcast_to(fill_value, tuple(map(min, chunks, shape)))
        # A chunk file may be a little longer than its decoded data, because compressors lengthen incompressible data.
        body = self._store.read_file(file, self._chunk_bytes + self._chunk_bytes // 8 + 4096)
        decoded = decode_chunk(f"{self._store.name}: {file}", codec, body, self._chunk_bytes)
        return decoded.view(dtype).reshape(chunks, order=order)[tuple(map(slice, shape))]  # type: ignore[arg-type]


def _read_array_metadata(where: str, store: ZarrStore, name: str) -> ArrayMetadata:
    """Parse and check the metadata of an array of format 2 or 3."""
    is_v2 = f"{name}/.zarray" in store.sizes
    file = ".zarray" if is_v2 else "zarr.json"
    metadata = parse_json(f"{where}/{file}", store.read_file(f"{name}/{file}", MAX_JSON_BYTES))
    spec = _parse_v2_metadata(where, metadata) if is_v2 else _parse_v3_metadata(where, metadata)
    if len(spec.shape) != len(spec.chunks) or not spec.shape:
        got = f"shape {spec.shape}, chunks {spec.chunks}"
        raise dataset_error(where, "an axis of steps, and chunks for every axis", got)
    if spec.codec is not None and spec.codec not in CODECS:
        raise dataset_error(where, f"one of the compressors {', '.join(CODECS)}", reprlib.repr(spec.codec))
    if spec.separator not in (".", "/"):
        raise dataset_error(where, "a separator . or /", reprlib.repr(spec.separator))
    value = metadata.get("fill_value")
    value = 0 if value is None else _SPECIAL_NUMBERS.get(value, value) if isinstance(value, str) else value
    try:
        with np.errstate(all="ignore"):
            fill_value = np.array(complex(*value) if isinstance(value, list) else value)
            fill_value = fill_value.astype(spec.dtype, casting="unsafe")
    except (TypeError, ValueError, OverflowError):
        raise dataset_error(where, "a number as fill value", reprlib.repr(value)) from None
    return spec._replace(fill_value=fill_value)


def _parse_v2_metadata(where: str, metadata: dict[str, Any]) -> ArrayMetadata:
    """Parse the metadata of format 2; `_read_array_metadata` checks the values that both formats have."""
    dtype = _parse_dtype(where, metadata.get("dtype"), _V2_DTYPE)
    order, filters, codec = (metadata.get(key) for key in ("order", "filters", "compressor"))
    if order not in ("C", "F") or filters:
        raise dataset_error(where, "order C or F, and no filters", f"order {order!r}, filters {reprlib.repr(filters)}")
    codec = codec.get("id", "") if isinstance(codec, dict) else codec
    separator = metadata.get("dimension_separator", ".")
    shape, chunks = _parse_shape_and_chunks(where, metadata.get("shape"), metadata.get("chunks"))
    return ArrayMetadata(shape, dtype, chunks, None, order, codec, "", separator)


def _parse_v3_metadata(where: str, metadata: dict[str, Any]) -> ArrayMetadata:
    """Parse the metadata of format 3; `_read_array_metadata` checks the values that both formats have."""
    dtype = _parse_dtype(where, metadata.get("data_type"), _V3_DTYPE)
    grid, grid_settings = _parse_extension(where, "chunk_grid", metadata.get("chunk_grid"))
    encoding, encoding_settings = _parse_extension(where, "chunk_key_encoding", metadata.get("chunk_key_encoding"))
    if grid != "regular" or encoding not in ("default", "v2") or metadata.get("storage_transformers"):
        raise dataset_error(where, "a regular grid of chunks", f"{grid!r}, {encoding!r}")
    codecs = metadata.get("codecs")
    if not isinstance(codecs, list) or not 1 <= len(codecs) <= 8:
        raise dataset_error(where, "a list of codecs", reprlib.repr(codecs))
    (serializer, settings), *compressors = (_parse_extension(where, "codec", codec) for codec in codecs)
    if serializer != "bytes" or len(compressors) > 1:
        got = ", ".join(repr(codec) for codec in (serializer, *(codec for codec, _ in compressors)))
        remedy = "Write it without sharding or transposing."
        raise dataset_error(where, "the codec 'bytes' and one compressor", got, remedy)
    dtype = dtype.newbyteorder(">" if settings.get("endian") == "big" else "<")
    codec = compressors[0][0] if compressors else None
    separator = encoding_settings.get("separator", "/" if encoding == "default" else ".")
    chunk_prefix = f"c{separator}" if encoding == "default" else ""
    shape, chunks = _parse_shape_and_chunks(where, metadata.get("shape"), grid_settings.get("chunk_shape"))
    return ArrayMetadata(shape, dtype, chunks, None, "C", codec, chunk_prefix, separator)


def _parse_shape_and_chunks(where: str, shape: Any, chunks: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return parse_sizes(f"{where}: shape", shape), parse_sizes(f"{where}: chunks", chunks, 1)


def _parse_dtype(where: str, name: Any, pattern: re.Pattern[str]) -> np.dtype:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise dataset_error(where, "a dtype of numbers", reprlib.repr(name))
    return np.dtype(name)


def _parse_extension(where: str, key: str, extension: Any) -> tuple[str, dict[str, Any]]:
    """Parse the name and the settings of an extension of format 3, such as a codec."""
    if isinstance(extension, dict) and isinstance(extension.get("name"), str):
        settings = extension.get("configuration", {})
        if isinstance(settings, dict):
            return extension["name"], settings
    raise dataset_error(where, f"{key} with a name", reprlib.repr(extension))


_FIELDS_ATTRIBUTE = "relive_fields"
"""The attribute of a store in which `to_zarr` saves the field path of each array."""


def from_zarr(
    path: str | PathLike[str],
    buffer: Any = None,
    *,
    columns: Columns | None = None,
    final_obs: FinalObs = "repeat",
    sampler: Sampler | None = None,
    device: torch.device | str | Memory = "cpu",
    seed: int | None = None,
) -> Any:
    """Read a zarr store in diffusion policy's layout, block by block, into a buffer; return the buffer.

    The store has an array per column in `data`, with the steps of all episodes, and `meta/episode_ends`. The columns
    "action", "reward", "terminated" and "truncated" are these fields, a column with the name of an extra field of
    `buffer` is that field, and all others are parts of the observation. A store without rewards gives 0; one without
    flags is truncated where an episode ends. The store may be a folder or a .zip, of format 2 or 3.

    The layout has no final observations. A last step stores its own observation as the next one, unless `final_obs`
    drops the step: imitation needs every action, and never looks at the next observation.

    Args:
        path: the folder or .zip.
        buffer: the buffer to fill: a ReplayBuffer, a RolloutBuffer with num_envs=None or a DistillationBuffer. None
            makes a ReplayBuffer with space for all steps, in which float64 becomes float32.
        columns: the fields of columns that are not the usual ones: `{"n_contacts": None}` leaves a column out,
            `{"img": "obs.camera", "stage": "stage"}` renames one and makes the other an extra field.
        final_obs: "repeat" stores a truncated last step with its own observation as the next one, from which a learner
            then bootstraps; "drop" leaves it out. None is "drop" with a `DataWarning`.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    with open_store(Path(path)) as store:
        source = _ZarrSource(store)
        return fill_from_rows(
            "from_zarr", source, buffer, columns, None, final_obs, sampler=sampler, device=device, seed=seed
        )


class _ZarrSource(RowSource):
    """The rows of a store: the arrays in `data`."""

    def __init__(self, store: ZarrStore) -> None:
        self._store, self.name, self.nbytes = store, store.name, store.nbytes
        self._arrays = {name: ZarrArray(store, f"data/{name}") for name in _find_arrays(store, "data/")}
        if not self._arrays or not _has_array(store, "meta/episode_ends"):
            expected, remedy = "arrays in 'data', and 'meta/episode_ends'", "Pass a store in diffusion policy's layout."
            got = ", ".join(sorted({name.split("/")[0] for name in store.sizes})) or "an empty folder"
            raise dataset_error(store.name, expected, got, remedy)
        self._ends = _read_episode_ends(ZarrArray(store, "meta/episode_ends"), store.nbytes)
        for array in self._arrays.values():
            if array.spec.shape[0] != self._ends[-1]:
                expected = f"{self._ends[-1]} rows, the last of meta/episode_ends"
                raise dataset_error(array.where, expected, array.spec.shape)
        if not any(array.has_all_chunks for array in self._arrays.values()):
            raise dataset_error(store.name, "an array whose chunks are all stored", "only arrays with missing chunks")
        self._fields = _read_saved_fields(store)

    def describe_columns(self, user_columns: Columns) -> dict[str, ColumnSpec]:
        return {
            name: ColumnSpec(
                array.spec.shape[1:],
                array.spec.dtype,
                self._fields.get(name, (name,) if name in STEP_FIELDS else ("obs", *name.split("/"))),
            )
            for name, array in self._arrays.items()
        }

    def read_rows(self, columns: Sequence[str], max_rows: int) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        total = int(self._ends[-1])
        for start in range(0, total, max_rows):
            stop = min(start + max_rows, total)
            values = {column: self._arrays[column].read_rows(start, stop) for column in columns}
            yield np.searchsorted(self._ends, np.arange(start, stop), "right"), values

    def make_final_obs_reader(self, obs_columns: list[str]) -> Callable[[int], dict[str, Any]] | None:
        if not all(_has_array(self._store, f"meta/final_obs/{name}") for name in obs_columns):
            return None
        arrays = {name: ZarrArray(self._store, f"meta/final_obs/{name}") for name in obs_columns}
        for name, array in arrays.items():
            obs_spec = self._arrays[name].spec
            shape = (len(self._ends), *obs_spec.shape[1:])
            if array.spec.shape != shape or array.spec.dtype != obs_spec.dtype:
                expected = f"shape {shape}, and the dtype of data/{name}"
                raise dataset_error(array.where, expected, f"shape {array.spec.shape}")
        return lambda number: {name: array.read_rows(number, number + 1) for name, array in arrays.items()}


def _find_arrays(store: ZarrStore, prefix: str) -> list[str]:
    names = set()
    for name in store.sizes:
        if name.startswith(prefix) and name.endswith("/.zarray"):
            names.add(name[len(prefix) : -len("/.zarray")])
        elif name.startswith(prefix) and name.endswith("/zarr.json"):
            metadata = parse_json(f"{store.name}: {name}", store.read_file(name, MAX_JSON_BYTES))
            if metadata.get("node_type") == "array":
                names.add(name[len(prefix) : -len("/zarr.json")])
    return sorted(names)


def _has_array(store: ZarrStore, name: str) -> bool:
    return f"{name}/.zarray" in store.sizes or f"{name}/zarr.json" in store.sizes


def _read_episode_ends(array: ZarrArray, dataset_bytes: int) -> np.ndarray:
    spec, max_bytes = array.spec, compute_decoding_limit(dataset_bytes)
    if len(spec.shape) != 1 or spec.dtype.kind not in "iu" or not spec.shape[0] or 32 * spec.shape[0] > max_bytes:
        raise dataset_error(array.where, "a list of whole numbers", f"{spec.dtype} of shape {spec.shape}")
    ends = array.read_rows(0, spec.shape[0]).astype(np.int64)
    if ends[0] < 1 or (np.diff(ends) < 1).any():
        raise dataset_error(array.where, "numbers that grow, from 1 on", reprlib.repr(ends.tolist()))
    return ends


def _read_saved_fields(store: ZarrStore) -> Mapping[str, FieldPath]:
    if ".zattrs" not in store.sizes:
        return {}
    where = f"{store.name}: .zattrs"
    fields = parse_json(where, store.read_file(".zattrs", MAX_JSON_BYTES)).get(_FIELDS_ATTRIBUTE, {})
    if not isinstance(fields, dict):
        raise dataset_error(where, f"an object in {_FIELDS_ATTRIBUTE!r}", reprlib.repr(fields))
    for path in fields.values():
        if not isinstance(path, list) or not path or not all(isinstance(part, str) for part in path):
            raise dataset_error(where, "lists of names", reprlib.repr(path))
    return {column: tuple(path) for column, path in fields.items()}


_CHUNK_BYTES = 2_000_000
"""Bytes of a chunk that `to_zarr` writes."""

WriteFile = Callable[[str, bytes], None]
"""A function that writes a file of a store, given its name and bytes."""


def to_zarr(replay: ReplayBuffer, path: str | PathLike[str]) -> None:
    """Write the episodes of a replay buffer as a zarr store (format 2), which `from_zarr` reads back bit for bit.

    The array `data/x` is the part "x" of the observation, `data/obs` an observation without parts; "action", "reward",
    "terminated", "truncated" and extra fields have arrays of their names. Final observations are in `meta/final_obs`,
    and the attributes of the root say which field each array is. The store appears when it is whole.

    Args:
        replay: a replay buffer in time order, with at least one step.
        path: the folder, or the .zip, which must not exist.
    """
    require_time_order("to_zarr", replay)
    check_nonempty("to_zarr", len(replay))
    with write_atomically("to_zarr", path) as unfinished:
        if unfinished.suffix == ".zip":
            with zipfile.ZipFile(unfinished, "x") as archive:
                _write_arrays(replay, archive.writestr)
            return

        def write(name: str, body: bytes) -> None:
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / name).write_bytes(body)

        _write_arrays(replay, write)


def _write_arrays(replay: ReplayBuffer, write: WriteFile) -> None:
    arrays: dict[str, _ZarrArrayWriter] = {}
    names: dict[FieldPath, str] = {}
    steps = 0

    def append(name: str, rows: np.ndarray) -> None:
        if name not in arrays:
            arrays[name] = _ZarrArrayWriter(write, name, rows)
        arrays[name].append_rows(rows)

    for episode in read_episode_arrays(replay):
        final = slice_leaves(episode.pop("next_obs"), slice(-1, None))
        leaves = dict(iter_leaves((), episode))
        names = names or _choose_array_names(leaves)
        for path, rows in leaves.items():
            append(f"data/{names[path]}", rows)
        for path, rows in iter_leaves(("obs",), final):
            append(f"meta/final_obs/{names[path]}", rows)
        steps += len(episode["terminated"])
        append("meta/episode_ends", np.array([steps]))
    for array in arrays.values():
        array.write_metadata()
    for group in ("", "data/", "meta/", "meta/final_obs/"):
        write(f"{group}.zgroup", to_json({"zarr_format": 2}))
    write(".zattrs", to_json({_FIELDS_ATTRIBUTE: {name: list(path) for path, name in names.items()}}))


def _choose_array_names(leaves: Mapping[FieldPath, Any]) -> dict[FieldPath, str]:
    """Return the array name of each leaf: short if it is unique, otherwise the whole path."""
    short_names = {parts: "_".join(parts[1:] if parts[0] == "obs" and parts[1:] else parts) for parts in leaves}
    name_counts = Counter(short_names.values())
    return {parts: name if name_counts[name] == 1 else ".".join(parts) for parts, name in short_names.items()}


class _ZarrArrayWriter:
    """Writes an array chunk by chunk, along its first axis."""

    def __init__(self, write: WriteFile, name: str, rows: np.ndarray) -> None:
        self._write, self._name = write, name
        self._row_shape, self._dtype = rows.shape[1:], rows.dtype
        row = max(1, int(np.prod(self._row_shape)) * self._dtype.itemsize)
        self._chunk = np.zeros((max(1, _CHUNK_BYTES // row), *self._row_shape), self._dtype)
        self._rows = 0
        self._codec = import_extra("numcodecs", "zarr").Blosc("lz4", clevel=5, shuffle=1)

    def append_rows(self, rows: np.ndarray) -> None:
        length = len(self._chunk)
        while len(rows):
            start = self._rows % length
            part = rows[: length - start]
            self._chunk[start : start + len(part)] = part
            self._rows += len(part)
            rows = rows[len(part) :]
            if self._rows % length == 0:
                self._write_chunk()

    def _write_chunk(self) -> None:
        coordinates = ((self._rows - 1) // len(self._chunk), *(0 for _ in self._row_shape))
        self._write(f"{self._name}/{'.'.join(map(str, coordinates))}", bytes(self._codec.encode(self._chunk)))
        self._chunk[...] = 0

    def write_metadata(self) -> None:
        if self._rows % len(self._chunk):
            self._write_chunk()
        metadata = {
            "zarr_format": 2,
            "shape": [self._rows, *self._row_shape],
            "chunks": list(self._chunk.shape),
            "dtype": self._dtype.str,
            "compressor": self._codec.get_config(),
            "fill_value": None if self._dtype.kind == "c" else 0,
            "order": "C",
            "filters": None,
        }
        self._write(f"{self._name}/.zarray", to_json(metadata))
