"""Numpy arrays are read directly, with the same result as through the buffer protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relive import kernels

native: Any = kernels.native()
pytestmark = pytest.mark.skipif(native is None, reason="there is no native core to read arrays")

DTYPES = [np.dtype(letter) for letter in "?bBhHiIlLqQefdFD"]


def variants(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Arrays [3, 4] with the same values in every memory layout, and some objects that are not such arrays."""
    plain = (np.arange(12).reshape(3, 4) % 5).astype(dtype)
    moved = np.zeros(12 * dtype.itemsize + 1, np.uint8)[1:].view(dtype).reshape(3, 4)
    moved[...] = plain
    fixed = plain.copy()
    fixed.flags.writeable = False
    return {
        "plain": plain,
        "read-only": fixed,
        "columns first": np.asfortranarray(plain),
        "every second": np.repeat(plain, 2, 1)[:, ::2],
        "backwards": plain[::-1].copy()[::-1],
        "unaligned": moved,
        "big-endian": plain.astype(dtype.newbyteorder(">")),
        "transposed": plain.T,
        "one row": plain[:1],
        "one number": plain[0, 0].reshape(1)[0:1].reshape(()),
        "no rows": plain[:0],
        "broadcast": np.broadcast_to(plain[:1], (3, 4)),
        "a field of a record": _field_of_a_record(plain),
    }


def _field_of_a_record(plain: np.ndarray) -> np.ndarray:
    record = np.zeros((3, 4), [("flag", np.int8), ("x", plain.dtype), ("y", np.float64)])
    record["x"] = plain
    return record["x"]


def written(array: Any, dtype: np.dtype) -> tuple[int, bytes]:
    """Return the answer of the native core for an array, and the written row."""
    column = np.zeros((2, 3, 4), dtype)
    answer = native.Columns([column], [False], 0).write(1, (array,), None)
    return answer, column.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", variants(np.dtype("f")))
def test_an_array_is_read_like_its_buffer(dtype: np.dtype, layout: str) -> None:
    array: Any = variants(dtype)[layout]
    assert written(array, dtype) == written(memoryview(array), dtype)


def test_the_memory_of_this_numpy_is_read_directly() -> None:
    assert native.reads_numpy()


def test_an_array_type_without_probes_is_not_read() -> None:
    class Other:
        """An object whose memory is not that of an array."""

    native.set_numpy(Other, [np.zeros(3)])
    assert written(Other(), np.dtype("f"))[0] == 0
    assert written(np.ones((3, 4), "f"), np.dtype("f"))[0] == -1
