"""Numpy arrays are read directly, with the same result as through the buffer protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relive import kernels

native: Any = kernels.native_core()
pytestmark = pytest.mark.skipif(native is None, reason="there is no native core to read arrays")

DTYPES = [np.dtype(letter) for letter in "?bBhHiIlLqQefdFD"]


def make_variants(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return arrays with the same values, most of shape [3, 4], in every memory layout."""
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


def write_natively(array: Any, dtype: np.dtype) -> tuple[int, bytes]:
    """Write an array as a row. Return the status, 0 for a refused array, and the bytes of the column."""
    column = np.zeros((2, 3, 4), dtype)
    status = native.Columns([column], [False], 0).write(1, (array,), None)
    return status, column.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", make_variants(np.dtype("f")))
def test_an_array_is_read_like_its_buffer(dtype: np.dtype, layout: str) -> None:
    array: Any = make_variants(dtype)[layout]
    assert write_natively(array, dtype) == write_natively(memoryview(array), dtype)


def test_the_memory_of_this_numpy_is_read_directly() -> None:
    assert native.reads_numpy()


def test_an_array_type_without_probes_is_not_read() -> None:
    class Other:
        pass

    native.set_numpy(Other, [np.zeros(3)])
    assert write_natively(Other(), np.dtype("f"))[0] == 0
    assert write_natively(np.ones((3, 4), "f"), np.dtype("f"))[0] == -1
