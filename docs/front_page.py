"""Writes the tables of the README and of docs/ that come from kept results and from docstrings.

    python docs/front_page.py

Run it after one of these sources has changed; a test compares the tables with them:

- conformance tables: docs/conformance.json
- bytes of buffers: buffers of Stable-Baselines3 and ours, made and measured
- measurements: the newest kept benchmarks
- migrating pages: docs/migrating/originals.json and the newest kept results of the suite "adapters"
- launches in the GPU guide: docs/launches.json
- reference: the docstrings of the package
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from statistics import mean, stdev
from typing import Any

import numpy as np
from gymnasium import spaces

from relive_conformance import case
from relive_conformance.outcome import PASSES
from relive_conformance.report import SYMBOLS, Report, summary

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MIGRATING = ROOT / "docs" / "migrating"
SHOWN_CASES = [case(number) for number in ("T2", "T4", "T7", "T12", "T24")]
_BESIDE = "\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}"
BEFORE, AFTER = "Stable-Baselines3", "relive"


def _report() -> Report:
    return Report.from_json((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))


def cases() -> Iterator[str]:
    """A line per case, a column per library."""
    yield from summary(_report())


def conformance() -> Iterator[str]:
    """A line per library: numbers of cases, and the outcomes of five cases."""
    report = _report()
    headings = (f"{one.title} ({one.number})" for one in SHOWN_CASES)
    yield f"| | {_BESIDE.join(SYMBOLS.values())} | " + " | ".join(headings) + " |"
    yield "|---|" + ":-:|" * (1 + len(SHOWN_CASES))
    for result in sorted(report.results, key=lambda result: -result.count(PASSES)):
        counts = _BESIDE.join(str(result.count(status)) for status in SYMBOLS)
        cells = [counts, *(SYMBOLS[result.outcomes[one.number].status] for one in SHOWN_CASES)]
        yield f"| {result.name} | " + " | ".join(cells) + " |"


def buffers() -> Iterator[str]:
    """A line per buffer: its bytes in both libraries, measured now (needs Stable-Baselines3)."""
    from stable_baselines3.common import buffers as theirs  # noqa: PLC0415 (an extra)

    from relive.compat import stable_baselines3 as ours  # noqa: PLC0415 (an extra)

    yield f"| | {BEFORE} | {AFTER} |"
    yield "|---|--:|--:|"
    cart_pole = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)
    images = spaces.Box(0, 255, (84, 84, 4), np.uint8), spaces.Discrete(6)
    for label, size, (obs, action), options, per in (
        ("50,000 transitions of CartPole", 50_000, cart_pole, {}, 1),
        ('the same, with `replay_buffer_kwargs={"next_obs": "shared"}`', 50_000, cart_pole, {"next_obs": "shared"}, 1),
        ('per transition: four 84 × 84 images, with `{"n_stack": 4}`', 10_000, images, {"n_stack": 4}, 10_000),
    ):
        both = theirs.ReplayBuffer(size, obs, action), ours.ReplayBuffer(size, obs, action, **options)
        yield f"| {label} | " + " | ".join(f"{_held_bytes(buffer) / per:,.0f}" for buffer in both) + " |"


def _held_bytes(buffer: Any) -> int:
    arrays = (value.nbytes for value in vars(buffer).values() if isinstance(value, np.ndarray))
    return getattr(buffer, "nbytes", None) or sum(arrays)


def _kept(system: str) -> dict[str, Any]:
    return json.loads((MIGRATING / "originals.json").read_text(encoding="utf-8"))[system]


def adapter(system: str) -> Iterator[str]:
    """A line per check of an adapter: its names, and the original's own tests."""
    kept = _kept(system)
    yield f"| with {kept['title']} {kept['version']} | |"
    yield "|---|---|"
    yield f"| names found at their paths below `relive.compat` | {kept['names']} of {kept['names']} |"
    for tests in kept["tests"].values():
        yield f"| its own tests on our classes: {tests['of']} | {tests['passed']} of {tests['total']} |"


def trainers(system: str) -> Iterator[str]:
    """A line per trainer: scores with both libraries' buffers, with the same seeds."""
    kept = _kept(system)
    yield f"| trainer | task | seeds | buffers of {kept['title']} | of relive |"
    yield "|---|---|--:|--:|--:|"
    if not kept["trainings"]:
        yield "| none compared yet | | | | |"
    for name, run in kept["trainings"].items():
        sides = (_spread(run[side]) for side in ("original", "relive"))
        yield f"| {name} | {run['task']} | {len(run['relive'])} | {' | '.join(sides)} |"


def _spread(scores: list[float]) -> str:
    """The mean, with the standard error if there are several scores."""
    digits = 0 if max(map(abs, scores)) >= 100 else 1 if max(map(abs, scores)) >= 10 else 3
    error = f" ± {stdev(scores) / len(scores) ** 0.5:,.{digits}f}" if len(scores) > 1 else ""
    return f"{mean(scores):,.{digits}f}{error}".replace("-", "−")


def calls(system: str) -> Iterator[str]:
    """A line per call of a training loop: both medians and their ratio, from the newest kept run that has them."""
    title = _kept(system)["title"]
    run, cases = _newest_run(title)
    caveats = [", on a busy machine"] * run["machine"]["busy"] + [", a quick look"] * run["quick"]
    yield f"| call{''.join(caveats)} | {title}, µs | relive, µs | times as fast (95 %) |"
    yield "|---|--:|--:|--:|"
    for call, result in cases.items():
        theirs, ours = (result["timings"].get(name) for name in (title, AFTER))
        if theirs and ours:
            medians = (_microseconds(timing["median_us"]) for timing in (theirs, ours))
            ratio = ours["times_fastest_peer"]
            speed = f"{ratio['ratio']:.1f} ({ratio['low']:.1f}–{ratio['high']:.1f})"
            yield f"| {call} | {' | '.join(medians)} | {speed} |"


def _newest_run(title: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest kept run of the suite "adapters" with this library, and its cases by name."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("adapters-*.json"), reverse=True):
        run = json.loads(path.read_text(encoding="utf-8"))
        named = ((each.partition(": "), result) for each, result in run["cases"].items())
        cases = {name: result for (original, _, name), result in named if original == title}
        if cases:
            return run, cases
    raise ValueError(f"benchmarks/results: expected a kept run of adapters with {title}, got none.")


def launches() -> Iterator[str]:
    """A line per call: how many operations it launches, by library."""
    kept = json.loads((ROOT / "docs" / "launches.json").read_text(encoding="utf-8"))
    yield f"| | {' | '.join(kept)} |"
    yield "|---|" + "--:|" * len(kept)
    for call in next(iter(kept.values())):
        yield f"| {call} | {' | '.join(counts.get(call, '–') for counts in kept.values())} |"


def measurements() -> Iterator[str]:
    """A line per measured call: our median, that of the fastest other library, and the ratio."""
    yield "| call | relive, µs | fastest other, µs | which | times as fast |"
    yield "|---|--:|--:|---|--:|"
    for suite in ("on_policy", "replay", "sequences", "save_load"):
        newest = max((ROOT / "benchmarks" / "results").glob(f"{suite}-*.json"))
        for call, result in json.loads(newest.read_text(encoding="utf-8"))["cases"].items():
            timings = [(each["median_us"], name, each["role"]) for name, each in result["timings"].items()]
            ours = min(median for median, _, role in timings if role == "ours")
            theirs, name, _ = min(each for each in timings if each[2] not in ("ours", "limit"))
            yield f"| {call} | {_microseconds(ours)} | {_microseconds(theirs)} | {name} | {theirs / ours:.1f} |"


def _microseconds(median: float) -> str:
    return f"{median:,.{0 if median >= 100 else 1}f}"


REFERENCE = {
    "buffers": "RolloutBuffer ReplayBuffer DistillationBuffer Mixture",
    "fields": "Field Carry Stacked Mutable Memory",
    "samplers": "Sampler Uniform Prioritized Linear WithoutReplacement Recent NewFirst Counted sequence_priority",
    "views": "View Transition NStep Sequence Hindsight Window",
    "estimators": "gae lambda_return n_step_return discounted_return vtrace group_advantage normalize"
    " explained_variance",
    "statistics": "EpisodeStats RunningNorm",
    "saving": "load",
    "processes": "connect prefetch RateLimit",
    "ray": "distributed.ReplayService distributed.Checkpoint distributed.Writer",
    "datasets": "datasets.from_minari datasets.to_minari datasets.from_hdf5 datasets.to_hdf5 datasets.from_zarr"
    " datasets.to_zarr datasets.from_lerobot datasets.to_lerobot",
    "inspecting": "inspect inspector.Report",
    "kernels": "kernels.backend kernels.force kernels.force_torch",
    "libraries": "compat.patch compat.unpatch",
    "errors": "SchemaError NotReadyError BufferFullError ClosedError PriorityError InvariantError CheckpointError"
    " CorruptCheckpoint IncompatibleCheckpoint NoCheckpoint DataWarning distributed.IncompatibleService"
    " distributed.ShardUnavailable",
}
"""Public names of each part of the reference, without `relive.`."""


def reference(part: str) -> Iterator[str]:
    """A line per name: its arguments and the first paragraph of its docstring."""
    yield "| name | what it is |"
    yield "|---|---|"
    for name in REFERENCE[part].split():
        named = resolve_name(f"relive.{name}")
        paragraph, _, _ = (inspect.getdoc(named) or "").partition("\n\n")
        sentence = " ".join(paragraph.split()).replace("|", "\\|")
        yield f"| `relive.{name}{_arguments(named)}` | {sentence} |"


def _arguments(named: Any) -> str:
    """The arguments of a function or a class, as text; empty for an exception."""
    if inspect.isclass(named) and issubclass(named, BaseException):
        return ""
    shown, starred = [], False
    for name, parameter in inspect.signature(named).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            shown.append("*")
        starred |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        optional = parameter.default is not parameter.empty
        shown.append(f"{prefix}{name}" + "=…" * optional)
    return f"({', '.join(shown)})"


Table = Callable[[], Iterator[str]]
TABLES: Mapping[str, Table] = {"conformance": conformance}


def written(page: str, tables: Mapping[str, Table] = TABLES) -> str:
    """Replace the tables of a page by those of the kept results."""
    for name, table in tables.items():
        mark = f"<!-- {name}: docs/front_page.py -->"
        place = re.compile(f"{re.escape(mark)}\n.*?\n\n", re.DOTALL)
        lines = "\n".join(table())
        page, count = place.subn(lambda _, mark=mark, lines=lines: f"{mark}\n{lines}\n\n", page)
        if count != 1:
            raise ValueError(f"expected {mark} and a table below it once, got it {count} times.")
    return page


def pages() -> Iterator[tuple[Path, Mapping[str, Table]]]:
    """Every page with tables of kept results: README, GPU guide, and the migrating page of each system."""
    yield README, TABLES
    yield ROOT / "docs" / "conformance.md", {"cases": cases}
    yield ROOT / "docs" / "performance.md", {"measurements": measurements}
    yield ROOT / "docs" / "reference.md", {f"reference {part}": partial(reference, part) for part in REFERENCE}
    yield ROOT / "docs" / "guides" / "gpu.md", {"launches": launches}
    for system in json.loads((MIGRATING / "originals.json").read_text(encoding="utf-8")):
        tables = {"adapter": adapter, "trainers": trainers, "calls": calls}
        # An original without trainers (rl-buffer) has no table of them.
        if "trainings" not in _kept(system):
            del tables["trainers"]
        beside: dict[str, Table] = {"buffers": buffers} if system == "stable_baselines3" else {}
        yield MIGRATING / f"{system}.md", beside | {name: partial(table, system) for name, table in tables.items()}


if __name__ == "__main__":
    for path, tables in pages():
        path.write_text(written(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
