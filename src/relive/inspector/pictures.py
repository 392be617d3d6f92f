"""Image observations as small PNG files, written without an image library."""

from __future__ import annotations

import struct
import zlib

import numpy as np

_LARGEST = 72
"""The most pixels of a frame's longer side; larger frames are averaged down."""
_CHANNELS = 16
_SMALLEST = 8


def is_picture(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a field of this shape and dtype is shown as an image: bytes with height and width."""
    sides = sorted(shape)[-2:]
    return dtype == "uint8" and 2 <= len(shape) <= 4 and sides[0] >= _SMALLEST


def frame(row: np.ndarray) -> np.ndarray:
    """The image of a row, [H, W] grey or [H, W, 3]; of stacked frames the newest."""
    picture = row[..., -1] if row.ndim == 4 else row
    if picture.ndim == 3:
        if picture.shape[-1] > _CHANNELS or picture.shape[0] < picture.shape[-1]:
            picture = np.moveaxis(picture, 0, -1)
        picture = picture if picture.shape[-1] == 3 else picture[..., -1]
    return _smaller(picture)


def _smaller(picture: np.ndarray) -> np.ndarray:
    factor = -(-max(picture.shape[:2]) // _LARGEST)
    if factor == 1:
        return picture
    height, width = (side // factor * factor for side in picture.shape[:2])
    blocks = picture[:height, :width].reshape(height // factor, factor, width // factor, factor, *picture.shape[2:])
    return blocks.mean((1, 3)).round().astype(np.uint8)


def png(picture: np.ndarray) -> bytes:
    """A picture [H, W] or [H, W, 3] of bytes as a PNG file."""
    height, width = picture.shape[:2]
    color = 2 if picture.ndim == 3 else 0
    # Each line begins with the number of its filter; 0 means unfiltered.
    lines = np.zeros((height, 1 + picture[0].size), np.uint8)
    lines[:, 1:] = picture.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
