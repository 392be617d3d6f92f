"""Arrays in memory that is mapped: in files that several processes map, at once or one after the other, or in none."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from typing import Any

import torch

from relive.errors import explain
from relive.memory.space import in_gibibytes, resident_bytes

_LARGE = 1 << 18
"""Bytes from which on memory is mapped, and has no pages before it is written."""
_LARGE_PAGES = 1 << 22
"""Bytes from which on pages of 2 MiB are worth their size."""
_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_reserved: dict[int, int] = {}
"""The bytes of the mappings that `zeros` made and that are still there."""


def mapped(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A file as a tensor: what is written there, whoever maps the file sees, and it stays when a process dies."""
    return tensor_in(mmap.mmap(file, max(math.prod(shape) * dtype.itemsize, 1)), shape, dtype)


def tensor_in(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor whose bytes are the first ones of a mapping."""
    count = math.prod(shape)
    return (
        torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
        if count
        else torch.empty(shape, dtype=dtype, device="cpu")
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of this process alone, whose pages come as they are written.

    The pages are the system's small ones: the first write into a page of 2 MiB takes milliseconds where the machine is
    a virtual one, and two to three times as long per byte (see benchmarks/first_fill.py).
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        remedy = "Make a smaller buffer, or raise the limit of this process."
        raise MemoryError(explain("memory", in_gibibytes(nbytes), error.strerror, remedy)) from error
    _reserved[id(memory)] = nbytes
    weakref.finalize(memory, _reserved.pop, id(memory), None)
    return tensor_in(memory, shape, dtype)


def expect_bulk(array: torch.Tensor) -> None:
    """Let an array on the host, in one piece, get large pages where the system has them: all of it is written now.

    Many rows at once are written three times as fast then; nobody waits for the single one.
    """
    if _madvise is None or not array.is_cpu or array.nbytes < _LARGE_PAGES:
        return
    start = array.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(
        start, array.data_ptr() + array.nbytes - start, mmap.MADV_HUGEPAGE
    )  # no error: it is advice


def unwritten_bytes() -> int:
    """A lower bound of what the arrays of `zeros` will still take when all of their pages are written."""
    reserved = sum(list(_reserved.values()))
    return max(reserved - resident_bytes(), 0) if reserved else 0


def grown(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Give an empty file the bytes of an array, zeros all.

    They are asked for now: where there is no room for them this is an error, and no page is missing later.
    """
    os.posix_fallocate(file, 0, max(math.prod(shape) * dtype.itemsize, 1))
