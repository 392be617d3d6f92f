"""Write docs/performance.md and its pictures from the newest kept results: `python -m benchmarks.page`."""

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
    "disk": "On disk",
    "processes": "Threads and processes",
    "ray_service": "On Ray",
    "training": "Whole trainings",
    "prefetch": "Prefetching",
}
NOTES = {
    "training": "CPU time inside the buffer of a whole training of Stable-Baselines3, with its buffers and with ours; "
    "what is learnt is on [its page](migrating/stable_baselines3.md).",
    "processes": "A call of all writers or all samplers together; how it works is on the page about "
    "[scaling](scaling.md).",
    "ray_service": "A row of all clients together; how it works is on the page about [scaling](scaling.md).",
    "disk": "A transition of 84×84 bytes, with less memory than there is data and with enough. RAM is the limit.",
    "save_load": "Ours is on disk when `save` returns, and whole or not at all; the others leave to the system when, "
    "and what they left is written while ours waits for the disk. Our `load` verifies the checksum of every byte and "
    "every invariant of the buffer.",
    "prefetch": "An update of a DQN. A ratio below 1 says that prefetching costs more than it gains there: the thread "
    "that samples needs a core which the learner leaves alone.",
}
HEAD = """# Performance

Measured beside other libraries by the scripts in `benchmarks/`, everybody interleaved in one run, medians with the
durations that a tenth of the samples lie below and above (p10–p90). `make bench` or `relive bench --quick` does it
on your machine in about twelve minutes. Machines are noisy, so only ratios within one run mean anything: ours to the
fastest peer of that run, with the interval that a bootstrap gives in 95 of 100 cases. "Bar" is what we want to reach;
one that is not met says so. The limit is a copy of the same bytes (or what else its name says), which nobody can beat:
a dashed line in every picture.

This page is written by `python -m benchmarks.page` from the newest results in `benchmarks/results/`.
"""
GPU = """
## On a GPU

None of these figures is of a GPU; there the buffers run on torch operations alone. What costs time there is how many of
them are launched, and waiting for one of them, so both are counted in the tests (`tests/test_dispatched_ops.py`):

| hot path | launches | bound |
|---|---:|---:|
| a step of a rollout | 1 | fields + 1 |
| advantages (GAE) of 24 steps | 30 | 40 |
| a uniform batch of 7 fields | 10 | fields + 3 |
| a prioritized batch and its new priorities | 60 | 60 |

- **Nothing waits.** No hot path reads a number back from the device. `update_priority` returns how many rows were gone
  as a tensor there; `int()` of it waits. What would need a look is trusted and counted on the device, and `check()`
  tells.
- **`out=`.** `sample(…, out=batch)` and `minibatches(…, out=batch)` fill tensors of yours. Fresh tensors from torch's
  caching allocator are cheap on a GPU, and a batch that is kept stays whole; reuse is for graphs, and for large batches
  on the CPU.
- **CUDA graphs.** Capture the learner's update and leave the buffer outside: sample into the graph's static inputs with
  `out=`, then replay it. The estimators have fixed shapes and no synchronisation, so `rl.gae` can be captured (and
  compiled) with the update. `sample` cannot: the first batch after an `add` rebuilds a table, and a captured generator
  must be registered with the graph.
- **Where the memory is.** `device="cuda"` keeps rows there; `Memory.pinned()` keeps them on the host and
  `sample(…, device="cuda")` copies a batch asynchronously, which `rl.prefetch` does one batch ahead.
"""


def page(folder: Path = RESULTS, images: Path | None = None) -> str:
    """The whole page; pictures are drawn into `images`, if that is given."""
    parts = [HEAD]
    for suite, title in SUITES.items():
        run = last_kept(suite, folder)
        if run is not None and run.get("cases"):
            parts += [f"\n## {title}\n\n", *_section(suite, run, images)]
    if (memory := last_kept("memory", folder)) is not None:
        parts.append(
            f"\n## Memory\n\nBytes a transition that can be sampled. {about(memory)}\n\n{memory_table(memory)}"
        )
    if (scaling := last_kept("scaling", folder)) is not None:
        picture = "images/performance_scaling.png"
        if images is not None:
            curves(scaling["points"], images / Path(picture).name)
        words = "how advantages, minibatches, samples and adds grow with T, N, batch and capacity"
        parts.append(f"\n## How cost grows\n\n{about(scaling)}\n\n![{words}]({picture})\n")
    return "".join([*parts, GPU])


def _section(suite: str, run: dict[str, Any], images: Path | None) -> Iterator[str]:
    picture = f"performance_{suite}.png"
    if images is not None:
        bars(run["cases"], images / picture)
    if suite in NOTES:
        yield f"{NOTES[suite]}\n\n"
    yield f"{about(run)}\n\n![durations of every library, the limit as a line](images/{picture})\n\n{table(run)}"
    for case, found in run["cases"].items():
        for name, reason in found["refused"].items():
            yield f"\nNot timed at {case}: {name}, {reason}.\n"


def about(run: Mapping[str, Any]) -> str:
    """When, where, with which versions and how many threads."""
    machine = run["machine"]
    versions = {**machine.get("versions", {}), **{k: v for k, v in run.get("peers", {}).items() if k != "relive"}}
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    threads = f"{machine.get('torch_threads', '?')} torch threads"
    if machine.get("thread_variables"):
        threads += f" ({', '.join(f'{k}={v}' for k, v in machine['thread_variables'].items())})"
    busy = " **Others used the machine meanwhile**, so these ratios are indications." if machine.get("busy") else ""
    where = f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores, {threads}"
    return f"{run['date'][:10]}; {where}; Python {machine.get('python', '?')}, {named}.{busy}"


def table(run: Mapping[str, Any]) -> str:
    """A line for each contestant of each case."""
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
    """A line for each library at each shape."""
    lines = ["| case | library | held | process grew by | bar | met | wrong |", "|---|---|---:|---:|---:|---|---|"]
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
    (DOCS / "performance.md").write_text(page(images=DOCS / "images"), encoding="utf-8")
