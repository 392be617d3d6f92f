"""How much memory there is."""

from __future__ import annotations

import mmap
from pathlib import Path

from relive.errors import explain

_MUCH = 1 << 30
"""Bytes that are asked for without a look at the free memory."""


def available_bytes() -> int | None:
    """The host memory that could be used now, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no limit, or no such file
        return free
    return min(free, limit)


def resident_bytes() -> int:
    """The host memory that this process has pages of, where the system tells; else more than there can be."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 1 << 62


def require_memory(nbytes: int, where: str, remedy: str) -> None:
    """Refuse a request for more bytes than the host has: the system grants pages first, and ends the process later."""
    free = available_bytes() if nbytes > _MUCH else None
    if free is not None and nbytes > free:
        expected = f"at most {in_gibibytes(free)}, the free memory of this machine"
        raise MemoryError(explain(where, expected, in_gibibytes(nbytes), remedy))


def in_gibibytes(nbytes: int) -> str:
    """A number of bytes, of any size, for a message."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes < 1 << 90 else "more than any machine has"
