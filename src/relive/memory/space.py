"""How much memory there is."""

from __future__ import annotations

from pathlib import Path


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
