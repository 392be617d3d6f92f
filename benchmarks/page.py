"""Write docs/performance.md from the newest kept results: `python -m benchmarks.page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.suite import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
SUITES = {
    "on_policy": "On-policy",
    "sequences": "Sequences of rollouts",
    "replay": "Replay",
}
HEAD = """# Performance

Measured beside other libraries by the scripts in `benchmarks/`, everybody interleaved in one run, medians; `make bench`
does it on your machine. Machines are noisy, so only ratios within one run mean anything: ours to the fastest peer of
that run, with the interval that a bootstrap gives in 95 of 100 cases. "Bar" is what we want to reach; one that is
not met says so. A line called memcpy is the time of copying the same bytes once, which nobody can beat.

This page is written by `python -m benchmarks.page` from the newest results in `benchmarks/results/`.
"""


def newest(suite: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The last kept run of a suite."""
    files = sorted(folder.glob(f"{suite}-*.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def page(folder: Path = RESULTS) -> str:
    """The whole page."""
    parts = [HEAD]
    for suite, title in SUITES.items():
        run = newest(suite, folder)
        if run is not None:
            parts.append(f"\n## {title}\n\n{about(run)}\n\n{table(run)}")
    parts.append(OTHERS)
    return "".join(parts)


OTHERS = """
## Elsewhere

What writers and samplers of several processes and machines get through is on the page about [scaling](scaling.md);
disk memory beside RAM and TorchRL's memmap is in `benchmarks/disk.py`; whole trainings of Stable-Baselines3 with its
buffers and ours are on [its page](migrating/stable_baselines3.md).

![how sampling and adding grow with capacity and batch](images/replay_scaling.png)
"""


def about(run: dict[str, Any]) -> str:
    """When, where and with which versions."""
    machine = run["machine"]
    peers = ", ".join(f"{name} {version}" for name, version in sorted(run["peers"].items()) if name != "recollect")
    busy = " **Others used the machine meanwhile**, so these ratios are indications." if machine.get("busy") else ""
    cpu = machine.get("cpu") or machine.get("processor") or "unknown processor"
    return f"{run['date'][:10]}, {cpu}; beside {peers}.{busy}"


def table(run: dict[str, Any]) -> str:
    """A line for each contestant of each case."""
    lines = ["| case | library | µs | × fastest peer | bar | met |", "|---|---|---:|---:|---:|---|"]
    for case, found in run["cases"].items():
        bar = f"≥ {found['bar']['times_faster']:g}" if found["bar"] else ""
        ordered = sorted(found["timings"].items(), key=lambda item: item[1]["median_us"])
        for number, (name, timing) in enumerate(ordered):
            lines.append(_line("" if number else case, name, timing, bar))
    return "\n".join(lines) + "\n"


def _line(case: str, name: str, timing: dict[str, Any], bar: str) -> str:
    ours = timing["role"] == "ours"
    ratio = timing["times_fastest_peer"]
    times = f"{ratio['ratio']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else ""
    met = {True: "yes", False: "no", None: ""}[timing["met"]]
    shown = f"**{name}**" if ours else name
    return f"| {case} | {shown} | {_us(timing['median_us'])} | {times} | {bar if ours else ''} | {met} |"


def _us(micros: float) -> str:
    return f"{micros:,.0f}" if micros >= 100 else f"{micros:.3g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
