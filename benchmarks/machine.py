"""A description of the machine and the software of a run."""

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
    """Return processor, system, versions and thread counts, without names of host or user."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "busy": is_busy(),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in ("torch", "numpy", "tensordict", "gymnasium", "numba")},
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
        "thread_variables": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    }


def is_busy() -> bool:
    """Whether other processes use a quarter of the cores, measured for a second while this process is idle.

    A parallel torch operation waits for its slowest thread, and on a core that is shared it waits for the scheduler:
    peers were seen a hundred times slower than on an idle machine.
    """
    before = _idle_and_all()
    if before is None:
        # The load of the last minute is a substitute; it includes this process.
        return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.25 * (os.cpu_count() or 1)
    time.sleep(1)
    idle, whole = (now - then for now, then in zip(_idle_and_all() or before, before, strict=True))
    return whole > 0 and idle / whole < 0.75


def _idle_and_all() -> tuple[int, int] | None:
    """Return the idle and total seconds of all cores; None if the system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:]]
    # A core that waits for a disk is idle too. Times of guests are not added: user time contains them.
    return ticks[3] + ticks[4], sum(ticks[:8])


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, or None."""
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
