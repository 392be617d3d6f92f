"""Arrays in memory that is mapped: in files that several processes map, at once or one after the other, or in none."""

from __future__ import annotations

import math
import mmap
import os

import torch

from relive.errors import explain
from relive.memory.space import in_gibibytes

_LARGE = 1 << 22
"""Bytes from which on pages of 2 MiB are worth their size."""
_POPULATE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which Python does not name yet."""


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
    """Memory of this process alone, all of it there now; in large pages where the system has them."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        remedy = "Make a smaller buffer, or raise the limit of this process."
        raise MemoryError(explain("memory", in_gibibytes(nbytes), error.strerror, remedy)) from error
    tensor = tensor_in(memory, shape, dtype)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_POPULATE)
    except OSError:  # an older system: then pages come while zeros are written
        tensor.zero_()
    return tensor


def grown(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Give an empty file the bytes of an array, zeros all.

    They are asked for now: where there is no room for them this is an error, and no page is missing later.
    """
    os.posix_fallocate(file, 0, max(math.prod(shape) * dtype.itemsize, 1))
