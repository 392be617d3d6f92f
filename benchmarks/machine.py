"""Describe the machine and the software that a run was made with."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")


def describe() -> dict[str, Any]:
    """Processor, system, versions and thread counts; nothing that names a host or a user."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "busy": is_busy(),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("torch", "numpy", "tensordict", "gymnasium", "numba")},
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
        "thread_variables": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    }


def is_busy() -> bool:
    """Whether others keep a quarter of the cores working, looked at for a second in which this process does nothing.

    A parallel torch operation waits for its slowest thread, and on a core that is shared it waits for the scheduler:
    peers were seen a hundred times slower than on an idle machine.
    """
    before = _idle_and_all()
    if before is None:  # the last minute, then, with what this process did in it
        return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.25 * (os.cpu_count() or 1)
    time.sleep(1)
    idle, whole = (now - then for now, then in zip(_idle_and_all() or before, before, strict=True))
    return whole > 0 and idle / whole < 0.75


def _idle_and_all() -> tuple[int, int] | None:
    """How long all cores have done nothing, and how long they have run, where the system tells."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks[:8])  # idle and waiting for a disk; guests are counted in user time


def version_of(distribution: str) -> str | None:
    """Of what is installed, else None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
