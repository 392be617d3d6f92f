"""The report in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relive.conformance.case import Case
from relive.conformance.outcome import DIFFERS, NOT_OFFERED, PASSES
from relive.conformance.report import SYMBOLS, Report, Result
from relive.errors import escaped

STYLES = {PASSES: "green", DIFFERS: "bold red", NOT_OFFERED: "dim"}
_ABREAST = 10
"""The number of cases side by side that fit in 80 columns."""


def show(console: Console, report: Report, cases: Sequence[Case]) -> None:
    """Print the table, every difference with its figures, and the libraries that could not be imported."""
    for start in range(0, len(cases), _ABREAST):
        abreast = cases[start : start + _ABREAST]
        console.print(_matrix(report, abreast))
        console.print(Text(", ".join(case.name for case in abreast), "dim"))
    console.print(Text.assemble(*(part for status in SYMBOLS for part in _legend(status))))
    for result in report.results:
        _differences(console, result, {case.number: case for case in cases})
    for name, reason in report.missing.items():
        console.print(Text(escaped(f"{name} did not import: {reason}"), "dim"), soft_wrap=True)


def _legend(status: str) -> tuple[tuple[str, str], str]:
    return (SYMBOLS[status], STYLES[status]), f" {status}   "


def _matrix(report: Report, cases: Sequence[Case]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for case in cases:
        table.add_column(case.number, justify="center", no_wrap=True)
    for result in report.results:
        said = (result.outcomes[case.number].status for case in cases)
        name = Text.assemble(escaped(result.name), (escaped(f" {result.version}"), "dim"))
        table.add_row(name, *(Text(SYMBOLS[status], STYLES[status]) for status in said))
    return table


def _differences(console: Console, result: Result, cases: dict[str, Case]) -> None:
    if not result.differences:
        return
    console.print()
    console.print(Text(escaped(f"{result.name} {result.version}".strip()), "bold"))
    for number, outcome in result.differences.items():
        console.print(Text.assemble((f"  {cases[number].name}: ", "bold red"), cases[number].sentence), soft_wrap=True)
        figures = f"     expected  {outcome.expected}\n     got       {outcome.got}"
        console.print(Text(escaped(figures)), soft_wrap=True)
        if outcome.reproduction:
            lines = "\n".join(f"     │ {line}" for line in outcome.reproduction.splitlines())
            console.print(Text(lines, "dim"), soft_wrap=True)
