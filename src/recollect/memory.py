"""Where data lives: a torch device, or a kind of memory that a device name cannot say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recollect.errors import SchemaError, explain


@dataclass(frozen=True)
class Memory:
    """What `device=` of a buffer names, when it is more than a device.

    >>> Memory.of("cpu")
    Memory(device=device(type='cpu'), is_pinned=False)
    """

    device: torch.device
    is_pinned: bool = False

    @staticmethod
    def pinned() -> Memory:
        """Host memory that an accelerator copies from asynchronously."""
        if not torch.accelerator.is_available():
            raise SchemaError(explain("Memory.pinned", "an accelerator", "none", 'Pass device="cpu".'))
        return Memory(torch.device("cpu"), is_pinned=True)

    @staticmethod
    def of(device: torch.device | str | Memory) -> Memory:
        """The memory that a `device=` argument names."""
        return device if isinstance(device, Memory) else Memory(device_of(device))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in this memory, to be written in any mode."""
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.device, pin_memory=self.is_pinned)

    def require(self, nbytes: int, where: str = "capacity") -> None:
        """Refuse a size, which the argument `where` said, that cannot fit.

        Pages are handed out on first use, so too much would end in a kill much later.
        """
        free = available_bytes() if self.device.type == "cpu" else 1 << 62  # elsewhere: what a number of bytes can be
        if free is not None and nbytes > free:
            expected = f"at most {free / 2**30:.2f} GiB, which is what this machine has free"
            remedy = f"Lower {where}, store frames as Stacked, or use smaller dtypes."
            raise MemoryError(explain(where, expected, f"{nbytes / 2**30:.2f} GiB", remedy))


def device_of(device: Any) -> torch.device:
    """The device that an argument names."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(explain("device", "a torch device", repr(device), 'Pass one, as in "cpu".')) from error


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
