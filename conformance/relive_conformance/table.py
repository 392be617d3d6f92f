"""The report as plain text, for a terminal or a log."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from relive_conformance.case import Case
from relive_conformance.report import SYMBOLS, Report, Result

_CASES_PER_LINE = 10
"""The number of cases side by side that fit in 80 columns."""


def table(report: Report, cases: Sequence[Case]) -> str:
    """Return the table, the figures of every difference, and the libraries that could not be imported."""
    return printable("\n".join(_lines(report, cases)))


def printable(text: str) -> str:
    """Escape control characters, to keep a terminal from executing them."""
    return "".join(c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text)


def _lines(report: Report, cases: Sequence[Case]) -> Iterator[str]:
    names = [f"{result.name} {result.version}".strip() for result in report.results]
    wide = max(map(len, names), default=0)
    for start in range(0, len(cases), _CASES_PER_LINE):
        columns = cases[start : start + _CASES_PER_LINE]
        yield " ".join([" " * wide, *(case.number for case in columns)])
        for name, result in zip(names, report.results, strict=True):
            symbols = (SYMBOLS[result.outcomes[case.number].status].center(len(case.number)) for case in columns)
            yield " ".join([name.ljust(wide), *symbols]).rstrip()
        yield from textwrap.wrap(", ".join(case.name for case in columns), shutil.get_terminal_size().columns)
        yield ""
    yield "   ".join(f"{symbol} {status}" for status, symbol in SYMBOLS.items())
    for result in report.results:
        yield from _differences(result, {case.number: case for case in cases})
    if report.missing:
        yield ""
    for name, reason in report.missing.items():
        yield f"{name} did not import: {reason}"


def _differences(result: Result, cases: dict[str, Case]) -> Iterator[str]:
    if result.differences:
        yield ""
        yield f"{result.name} {result.version}".strip()
    for number, outcome in result.differences.items():
        yield f"  {cases[number].name}: {cases[number].sentence}"
        yield f"     expected  {outcome.expected}"
        yield f"     got       {outcome.got}"
        yield from (f"     │ {line}" for line in outcome.reproduction.splitlines())
