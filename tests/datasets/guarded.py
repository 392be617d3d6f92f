"""Memory that shows what a decoder does wrong: pages that nobody may read, and blocks that are never zero by chance."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_M_PERTURB = -6


class Guarded:
    """A place for bytes that end where a page begins which kills the process that reads it."""

    def __init__(self, most: int) -> None:
        self._size = -(-most // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._size + mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert _libc.mprotect(start + self._size, mmap.PAGESIZE, 0) == 0

    def place(self, body: bytes) -> memoryview:
        """The bytes, with nothing behind them."""
        self._map[self._size - len(body) : self._size] = body
        return memoryview(self._map)[self._size - len(body) : self._size]


def perturb(byte: int) -> None:
    """Fill what malloc hands out from now on with a byte (glibc)."""
    _libc.mallopt(_M_PERTURB, byte)


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and by how many bytes the memory of this process was larger meanwhile, at most."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    found = work()
    return found, _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
