"""Arrays in files that several processes map, at once or one after the other."""

from __future__ import annotations

import math
import mmap
import os

import torch


def mapped(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A file as a tensor: what is written there, whoever maps the file sees, and it stays when a process dies."""
    count = math.prod(shape)
    memory = mmap.mmap(file, max(count * dtype.itemsize, 1))
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)


def grown(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Give an empty file the bytes of an array, zeros all.

    They are asked for now: where there is no room for them this is an error, and no page is missing later.
    """
    os.posix_fallocate(file, 0, max(math.prod(shape) * dtype.itemsize, 1))
