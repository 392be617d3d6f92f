"""Memory that reveals errors of a decoder: unreadable pages, and a fill byte for new memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_M_PERTURB = -6


class GuardedMemory:
    """Memory for bytes that end directly before an unreadable page: reading past the end kills the process."""

    def __init__(self, most: int) -> None:
        self._size = -(-most // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._size + mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert _libc.mprotect(start + self._size, mmap.PAGESIZE, 0) == 0

    def place(self, body: bytes) -> memoryview:
        """Return a view of the bytes, which end directly before the unreadable page."""
        self._map[self._size - len(body) : self._size] = body
        return memoryview(self._map)[self._size - len(body) : self._size]


def perturb(byte: int) -> None:
    """Make malloc fill new memory with a byte (glibc)."""
    _libc.mallopt(_M_PERTURB, byte)


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """Run `work`; return its result, and the peak growth of this process in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    actual = work()
    return actual, _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
