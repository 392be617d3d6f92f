"""A memory limit for this process, to measure a buffer that does not fit in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limit:
    """A new control group below the group of this process; it counts the page cache too."""

    folder: Path
    limit_file: str
    peak_file: str

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes."""
        return int((self.folder / self.peak_file).read_text())


@contextmanager
def limit_memory(nbytes: int) -> Iterator[Limit]:
    """Run the body with at most `nbytes` of memory; raises an OSError if the machine does not allow it."""
    group, names = _find_group()
    limit = Limit(group / f"relive-{os.getpid()}", *names)
    limit.folder.mkdir()
    try:
        (limit.folder / limit.limit_file).write_text(str(nbytes))
        (limit.folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield limit
        finally:
            (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        limit.folder.rmdir()


def _find_group() -> tuple[Path, tuple[str, str]]:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return GROUPS / "memory" / path.lstrip("/"), ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    path = next(path for number, _, path in lines if number == "0")
    return GROUPS / path.lstrip("/"), ("memory.max", "memory.peak")
