"""Chunks of a zarr store, decoded: what a chunk says of itself is compared with its bytes first."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from relive.datasets.installed import required
from relive.datasets.metadata import damage_named, wrong

_WINDOWS = {"zlib": 15, "gzip": 31}
_SLICE = 1 << 14
"""Compressed bytes that are inflated at once: they give at most 1,032 times as many."""

_BLOSC_HEADER = struct.Struct("<4B3I")
_BLOSC_COPY, _BLOSC_WHOLE = 0x02, 0x10
_BLOSC_COMPRESSORS = {0: "blosclz", 1: "lz4", 3: "zlib", 4: "zstd"}
_MOST_SPLITS, _LEAST_SPLIT = 16, 128


def decode(where: str, kind: str | None, body: Any, nbytes: int) -> np.ndarray:
    """The `nbytes` bytes of a chunk; raises, before anything is allocated, if it cannot have that many.

    Args:
        where: the chunk, for messages.
        kind: the compressor; None if the chunk is not compressed.
        body: the bytes of the file.
        nbytes: how many bytes the array says that a chunk has.
    """
    with damage_named(where, f"bytes that {kind} wrote"):
        if kind is None:
            _require_size(where, len(body), nbytes)
            return np.frombuffer(body, np.uint8)
        if kind in _WINDOWS:
            return _inflated(where, body, nbytes, _WINDOWS[kind])
        _require_size(where, _SIZES[kind](body), nbytes)
        if kind == "blosc":
            _require_blosc(body)
        out = np.zeros(nbytes, np.uint8)
        required("numcodecs", "zarr").get_codec({"id": kind}).decode(body, out=out)
        return out


def _require_size(where: str, claimed: int, nbytes: int) -> None:
    if claimed != nbytes:
        raise wrong(where, f"{nbytes:,} bytes", f"{claimed:,}")


def _inflated(where: str, body: Any, nbytes: int, window: int) -> np.ndarray:
    stream, view, done = zlib.decompressobj(window), memoryview(body), 0
    out = np.zeros(nbytes, np.uint8)
    for start in range(0, len(view), _SLICE):
        if stream.eof:
            raise ValueError("bytes after the end of the stream")
        part = stream.decompress(view[start : start + _SLICE], nbytes - done + 1)
        if done + len(part) > nbytes:
            raise wrong(where, f"{nbytes:,} bytes", f"{done + len(part):,}, or more")
        out[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    if not stream.eof or stream.unused_data:
        raise ValueError("bytes after the end of the stream" if stream.eof else "a stream without its end")
    _require_size(where, done, nbytes)
    return out


def _lz4_size(body: Any) -> int:
    return struct.unpack_from("<I", body)[0]


def _zstd_size(body: Any) -> int:
    magic, head = struct.unpack_from("<IB", body)
    if magic != 0xFD2FB528:
        raise ValueError(f"the magic number {magic:08x}")
    single, dictionary = (head >> 5) & 1, (0, 1, 2, 4)[head & 3]
    width = (single, 2, 4, 8)[head >> 6]
    field = bytes(body[5 + (1 - single) + dictionary :][:width])
    if not width or len(field) < width:
        raise ValueError("a frame without its size")
    return int.from_bytes(field, "little") + (256 if width == 2 else 0)


def _blosc_size(body: Any) -> int:
    return _BLOSC_HEADER.unpack_from(body)[4]


def _require_blosc(body: Any) -> None:
    """Raise unless the lengths and offsets in a blosc chunk agree with its bytes.

    c-blosc is not told how long the body is: it believes the header, and older versions the offsets too.
    """
    version, _, flags, typesize, nbytes, blocksize, length = _BLOSC_HEADER.unpack_from(body)
    if length != len(body):
        raise ValueError(f"a header that says {length:,} bytes, in a file of {len(body):,}")
    if version != 2 or flags & 0x08:
        raise ValueError(f"the version {version} and the flags {flags:#04x}")
    # With a rest, c-blosc would fill the end of each block from memory that it has never written.
    if not typesize or not 0 < blocksize <= nbytes or (blocksize > typesize and blocksize % typesize):
        raise ValueError(f"blocks of {blocksize:,} bytes, of items of {typesize}, in a chunk of {nbytes:,}")
    if flags & _BLOSC_COPY:
        if length != nbytes + _BLOSC_HEADER.size:
            raise ValueError(f"{length:,} bytes for a copy of {nbytes:,}")
        return
    if flags >> 5 not in _BLOSC_COMPRESSORS:
        raise ValueError(f"the compressor {flags >> 5}")
    _require_blosc_blocks(body, -(-nbytes // blocksize), nbytes % blocksize, typesize, blocksize, flags)


def _require_blosc_blocks(body: Any, blocks: int, rest: int, typesize: int, blocksize: int, flags: int) -> None:
    """Raise unless every block, and every part of one, lies in the body."""
    first = _BLOSC_HEADER.size + 4 * blocks
    if first > len(body):
        raise ValueError(f"{blocks:,} blocks in {len(body):,} bytes")
    is_split = not flags & _BLOSC_WHOLE and typesize <= _MOST_SPLITS and blocksize // typesize >= _LEAST_SPLIT
    for block, start in enumerate(struct.unpack_from(f"<{blocks}i", body, _BLOSC_HEADER.size)):
        at = start
        for _ in range(typesize if is_split and not (rest and block == blocks - 1) else 1):
            if not first <= at <= len(body) - 4:
                raise ValueError(f"block {block} at byte {at:,} of {len(body):,}")
            size = struct.unpack_from("<i", body, at)[0]
            at += 4 + size
            if size < 0 or at > len(body):
                raise ValueError(f"{size:,} bytes in block {block}, which ends after byte {len(body):,}")


_SIZES: dict[str, Callable[[Any], int]] = {"blosc": _blosc_size, "lz4": _lz4_size, "zstd": _zstd_size}
CODECS = (*_SIZES, *_WINDOWS)
"""The compressors that can be read."""
