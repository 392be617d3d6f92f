"""Timed cases as a table for people and as JSON for machines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .bars import Bar, find_bar
from .timing import Interval, Timing, fastest_peer, speedup, summary


@dataclass(frozen=True)
class Result:
    """One case: its timings, the peers that were refused with the reason, and the peers that do not offer it."""

    case: str
    timings: list[Timing]
    refused: dict[str, str] = field(default_factory=dict)
    not_offered: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    """One contestant of a case, with comparisons."""

    timing: Timing
    ratio: Interval | None
    """Speed relative to the fastest peer."""
    of_limit: Interval | None
    """Our speed relative to the physical limit."""
    verdict: bool | None


def judge(result: Result, rng: np.random.Generator) -> list[Line]:
    """Compare each contestant with the fastest peer, and ours with the bar; fastest first."""
    bar = find_bar(result.case)
    fastest = fastest_peer(result.timings, bar.aside if bar else None)
    limit = next((timing for timing in result.timings if timing.contestant.role == "limit"), None)
    lines: list[Line] = []
    for timing in sorted(result.timings, key=lambda timing: timing.median):
        ratio = speedup(timing, fastest, rng) if fastest else None
        ours = timing.contestant.role == "ours"
        verdict = _meets(bar, timing, ratio, result.timings) if ours and bar and ratio else None
        lines.append(Line(timing, ratio, speedup(timing, limit, rng) if ours and limit else None, verdict))
    return lines


def _meets(bar: Bar, timing: Timing, ratio: Interval, timings: list[Timing]) -> bool:
    limits = [other.median for other in timings if other.contestant.role == "limit"]
    within_limit = bar.times_memcpy is None or all(timing.median <= bar.times_memcpy * limit for limit in limits)
    asides = [other.median for other in timings if other.contestant.name == bar.aside]
    within_aside = bar.times_aside is None or all(timing.median <= bar.times_aside * aside for aside in asides)
    return ratio.ratio >= bar.times_faster and within_limit and within_aside


def print_table(outcomes: list[tuple[Result, list[Line]]], console: Console) -> None:
    """Print a table of all cases, and the peers that were not timed."""
    table = Table("case", "library", title="µs, medians; ratios to the fastest peer of the same run")
    for heading in ("median", "p10–p90", "× fastest peer (95 %)", "× limit", "bar", "met"):
        table.add_column(heading, justify="right")
    for result, lines in outcomes:
        bar = find_bar(result.case)
        for number, line in enumerate(lines):
            table.add_row("" if number else result.case, *_cells(line, bar), style=_style(line))
        table.add_section()
    console.print(table)
    for result, _ in outcomes:
        for name, reason in result.refused.items():
            console.print(f"[red]not timed[/red] {result.case}: {name}: {reason}")
        if result.not_offered:
            console.print(f"[dim]not offered[/dim] {result.case}: {', '.join(result.not_offered)}")


def _cells(line: Line, bar: Bar | None) -> list[str]:
    timing, ratio = line.timing, line.ratio
    spread = f"{_us(timing.percentile(10))}–{_us(timing.percentile(90))}"
    compared = f"{ratio.ratio:.2f} ({ratio.low:.2f}–{ratio.high:.2f})" if ratio else "–"
    required = _requirement(bar) if timing.contestant.role == "ours" and bar else ""
    met = {True: "yes", False: "no", None: ""}[line.verdict]
    spread += " noisy" * timing.is_noisy
    of_limit = f"{line.of_limit.ratio:.2f}" if line.of_limit else ""
    return [timing.contestant.name, _us(timing.median), spread, compared, of_limit, required, met]


def _requirement(bar: Bar) -> str:
    limit = f", ≤ {bar.times_memcpy:g} memcpy" if bar.times_memcpy else ""
    aside = f", ≤ {bar.times_aside:g} {bar.aside}" if bar.times_aside else ""
    return f"≥ {bar.times_faster:g}{limit}{aside}"


def _style(line: Line) -> str:
    if line.timing.contestant.role == "limit":
        return "dim"
    return {True: "green", False: "red", None: ""}[line.verdict]


def _us(seconds: float) -> str:
    micros = seconds * 1e6
    return f"{micros:,.0f}" if micros >= 100 else f"{micros:.3g}"


def write_json(path: Path, outcomes: list[tuple[Result, list[Line]]], about: dict[str, Any]) -> None:
    """Write the contents of the table, with `about` (date, machine, versions) at the top."""
    cases = {result.case: _case_json(result, lines) for result, lines in outcomes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "cases": cases}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _case_json(result: Result, lines: list[Line]) -> dict[str, Any]:
    bar = find_bar(result.case)
    return {
        "bar": asdict(bar) if bar else None,
        "timings": {
            line.timing.contestant.name: {
                **summary(line.timing),
                "times_fastest_peer": asdict(line.ratio) if line.ratio else None,
                "times_limit": asdict(line.of_limit) if line.of_limit else None,
                "met": line.verdict,
            }
            for line in lines
        },
        "refused": result.refused,
        "not_offered": result.not_offered,
    }
