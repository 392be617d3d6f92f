"""The page of all measurements and its pictures, from the newest kept results.

`make docs` builds the page; `python -m benchmarks.page` draws the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .plots import bars, curves, duration
from .suite import RESULTS, last_kept

DOCS = Path(__file__).parent.parent / "docs"
SUITES = {
    "on_policy": "On-policy",
    "sequences": "Sequences of rollouts",
    "replay": "Replay",
    "save_load": "Saving and loading",
    "disk": "Disk memory",
    "processes": "Threads and processes",
    "ray_service": "Ray service",
    "training": "Training runs",
    "prefetch": "Prefetching",
}
NOTES = {
    "training": "CPU time inside the buffer during a complete training run of Stable-Baselines3, with its buffers and "
    "with ours; [its page](migrating/stable_baselines3.md) shows the returns.",
    "processes": "Time per call of all writers or all samplers together; [Scaling](scaling.md) explains how it works.",
    "ray_service": "Time per row of all clients together; [Scaling](scaling.md) explains how it works.",
    "disk": "Transitions of 84×84 bytes, with less memory than data and with enough memory. The limit is a buffer in "
    "RAM.",
    "save_load": "Our checkpoint is on disk when `save` returns, and is complete or absent. The other libraries leave "
    "it to the system when to write, and their pending bytes are written while our `save` waits for the disk. "
    "Our `load` verifies the checksum of every byte and every invariant of the buffer.",
    "prefetch": "One update of a DQN. A ratio below 1 means that prefetching costs more than it gains: the sampling "
    "thread needs a core that the learner does not use.",
}
HEAD = """# All measurements

[Performance](performance.md) says what was measured and how. The tables show medians and the range between the 10th
and 90th percentile (p10–p90), and relive against the fastest peer of the run with a 95 % bootstrap interval. "Bar" is
the ratio that we aim for, and "met" says whether we reach it. The limit is a copy of the same bytes (unless its name
says otherwise), the dashed line in every plot. A row may be faster than it: a library that stores less, casts while it
copies, or keeps one array instead of several, moves fewer bytes or makes fewer calls.

This page is built from the newest results in `benchmarks/results/`.
"""


def page(folder: Path = RESULTS, images: Path | None = None) -> str:
    """Return the page; draw the pictures into `images` unless it is None."""
    parts = [HEAD]
    for suite, title in SUITES.items():
        run = last_kept(suite, folder)
        if run is not None and run.get("cases"):
            parts += [f"\n## {title}\n\n", *_section(suite, run, images)]
    if (memory := last_kept("memory", folder)) is not None:
        parts.append(
            f"\n## Memory\n\nBytes per transition that can be sampled. {about(memory)}\n\n{memory_table(memory)}"
        )
    if (scaling := last_kept("scaling", folder)) is not None:
        picture = "images/performance_scaling.png"
        if images is not None:
            curves(scaling["points"], images / Path(picture).name)
        words = "cost of advantages, minibatches, samples and adds by T, N, batch size and capacity"
        parts.append(f"\n## Scaling with size\n\n{about(scaling)}\n\n![{words}]({picture})\n")
    return "".join(parts)


def _section(suite: str, run: dict[str, Any], images: Path | None) -> Iterator[str]:
    picture = f"performance_{suite}.png"
    if images is not None:
        bars(run["cases"], images / picture)
    if suite in NOTES:
        yield f"{NOTES[suite]}\n\n"
    yield f"{about(run)}\n\n![durations of every library, with the limit as a line](images/{picture})\n\n{table(run)}"
    for case, found in run["cases"].items():
        for name, reason in found["refused"].items():
            yield f"\nNot timed at {case}: {name}, {reason}.\n"


def about(run: Mapping[str, Any]) -> str:
    """Return date, machine, versions and threads."""
    machine = run["machine"]
    versions = {**machine.get("versions", {}), **{k: v for k, v in run.get("peers", {}).items() if k != "relive"}}
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    threads = f"{machine.get('torch_threads', '?')} torch threads"
    if machine.get("thread_variables"):
        threads += f" ({', '.join(f'{k}={v}' for k, v in machine['thread_variables'].items())})"
    busy = " **Other jobs used the machine**, so these ratios are only indications." if machine.get("busy") else ""
    where = f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores, {threads}"
    return f"{run['date'][:10]}; {where}; Python {machine.get('python', '?')}, {named}.{busy}"


def table(run: Mapping[str, Any]) -> str:
    """Return a table with a line per contestant of each case."""
    headings = ("case", "library", "median", "p10–p90", "× fastest peer", "× limit", "bar", "met")
    lines = [f"| {' | '.join(headings)} |", "|---|---|---:|---:|---:|---:|---:|---|"]
    for case, found in run["cases"].items():
        ordered = sorted(found["timings"].items(), key=lambda item: item[1]["median_us"])
        for number, (name, timing) in enumerate(ordered):
            lines.append(_line("" if number else case, name, timing, found["bar"]))
    return "\n".join(lines) + "\n"


def _line(case: str, name: str, timing: Mapping[str, Any], bar: Mapping[str, Any] | None) -> str:
    ours = timing["role"] == "ours"
    ratio = timing["times_fastest_peer"]
    times = f"{ratio['ratio']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else ""
    spread = f"{duration(timing['p10_us'])}–{duration(timing['p90_us'])}"
    required = f"≥ {bar['times_faster']:g}" if ours and bar else ""
    shown = {"ours": f"**{name}**", "limit": f"*{name}*"}.get(timing["role"], name)
    limit = timing.get("times_limit")
    beside = f"{limit['ratio']:.2f}" if limit else ""
    cells = (case, shown, duration(timing["median_us"]), spread, times, beside, required, _yes(timing["met"]))
    return f"| {' | '.join(cells)} |"


def memory_table(run: Mapping[str, Any]) -> str:
    """Return a table with a line per library and shape."""
    lines = [
        "| case | library | bytes held | process growth | bar | met | wrong results |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for case, found in run["memory"].items():
        for number, (name, line) in enumerate(found["libraries"].items()):
            held, grown = (f"{x:,.1f}" if x is not None else "–" for x in (line["held"], line["resident"]))
            bar = "" if line["met"] is None else f"≤ {found['bar']:,.0f}"
            shown = f"**{name}**" if line["role"] == "ours" else name
            cells = ("" if number else case, shown, held, grown, bar, _yes(line["met"]), line["wrong"] or "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _yes(met: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[met]


if __name__ == "__main__":
    page(images=DOCS / "images")
