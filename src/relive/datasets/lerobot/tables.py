"""Columns of a LeRobot dataset as Arrow arrays."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from relive.datasets.installed import required
from relive.errors import SchemaError, explain


def is_image(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether numbers of this form are written as images: [height, width, 3] of uint8."""
    return dtype == np.uint8 and len(shape) == 3 and shape[2] == 3


def feature_of(name: str, rows: np.ndarray) -> dict[str, Any]:
    """What `meta/info.json` says of a column."""
    shape, dtype = rows.shape[1:], rows.dtype
    if is_image(shape, dtype):
        return {"dtype": "image", "shape": list(shape), "names": ["height", "width", "channels"]}
    if dtype.kind not in "biuf" or len(shape) > 5:
        remedy = "Write the buffer with to_hdf5 or to_zarr."
        raise SchemaError(explain(name, "real numbers with at most 5 axes", f"{dtype} of shape {shape}", remedy))
    return {"dtype": str(dtype), "shape": list(shape or (1,)), "names": ["0"] if shape == (1,) else None}


def column_of(rows: np.ndarray) -> Any:
    """Rows [K, …] as an Arrow array: numbers, lists of them, or images as lossless PNG."""
    pyarrow, inner = required("pyarrow", "lerobot"), rows.shape[1:]
    if is_image(inner, rows.dtype):
        bodies = pyarrow.array([_png(row) for row in rows], pyarrow.binary())
        paths = pyarrow.nulls(len(rows), pyarrow.string())
        return pyarrow.StructArray.from_arrays([bodies, paths], ["bytes", "path"])
    values = pyarrow.array(np.ascontiguousarray(rows).reshape(-1))
    if inner == (1,):  # as LeRobot keeps one number per frame
        return values
    if len(inner) == 1:
        return pyarrow.FixedSizeListArray.from_arrays(values, inner[0])
    for size in reversed(inner):
        offsets = np.arange(0, len(values) + 1, size, dtype=np.int32)
        values = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values)
    return values


def _png(pixels: np.ndarray) -> bytes:
    body = io.BytesIO()
    required("PIL.Image", "lerobot", "Pillow").fromarray(pixels).save(body, "PNG", compress_level=1)
    return body.getvalue()


class Moments:
    """The statistics of a column that LeRobot's policies normalise by; of images, of each channel between 0 and 1."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, 0.0, 0.0
        self._least, self._most = np.inf, -np.inf

    def update(self, rows: np.ndarray) -> None:
        """Take in rows [K, …]."""
        numbers = np.asarray(rows, np.float64)
        if is_image(rows.shape[1:], rows.dtype):
            numbers = numbers.reshape(-1, 3)[:, :, None, None] / 255
        numbers = numbers if numbers.ndim > 1 else numbers[:, None]
        self._count += len(numbers)
        self._sum, self._squares = self._sum + numbers.sum(0), self._squares + np.square(numbers).sum(0)
        self._least, self._most = np.minimum(self._least, numbers.min(0)), np.maximum(self._most, numbers.max(0))

    def as_json(self) -> dict[str, Any]:
        """What `meta/stats.json` says of the column."""
        mean = self._sum / self._count
        deviation = np.sqrt(np.maximum(self._squares / self._count - np.square(mean), 0))
        found = {"min": self._least, "max": self._most, "mean": mean, "std": deviation}
        return {name: np.asarray(each).tolist() for name, each in found.items()} | {"count": [self._count]}
