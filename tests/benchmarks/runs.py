"""Results files with figures that can be recognised."""

from __future__ import annotations

from typing import Any


def timing(role: str, median: float, ratio: tuple[float, float, float] | None = None, **more: Any) -> dict[str, Any]:
    """A contestant as a results file has it."""
    interval = None if ratio is None else dict(zip(("ratio", "low", "high"), ratio, strict=True))
    times = {"median_us": median, "p10_us": 0.9 * median, "p90_us": 1.1 * median}
    return {"role": role, **times, "times_fastest_peer": interval, "times_limit": None, "met": None, **more}


def run(cases: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A whole file."""
    machine = {"cpu": "Abacus 9", "cores": 2, "python": "3.11.0", "torch_threads": 2, "busy": False, "versions": {}}
    found = {
        case: {"bar": {"times_faster": 4.0}, "timings": timings, "refused": {}, "not_offered": []}
        for case, timings in cases.items()
    }
    return {"suite": "replay", "date": "2026-01-02T03:04:05", "machine": machine, "peers": {}, "cases": found, **more}
