"""Running the cases on libraries, and the report of their outcomes as data, as JSON and as Markdown."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.cases import CASES
from relive_conformance.outcome import DIFFERS, NOT_OFFERED, PASSES, Outcome
from relive_conformance.reproductions import REPRODUCTIONS

Progress = Callable[[str, str], None]
"""A function that is called with the library and the case before each case."""


@dataclass(frozen=True)
class Result:
    """The outcomes of one library, by the number of the case."""

    name: str
    version: str
    outcomes: dict[str, Outcome]

    @property
    def differences(self) -> dict[str, Outcome]:
        """The cases in which the library differs."""
        return {number: outcome for number, outcome in self.outcomes.items() if outcome.status == DIFFERS}

    def count(self, status: str) -> int:
        """Return the number of cases with a status."""
        return sum(outcome.status == status for outcome in self.outcomes.values())


@dataclass
class Report:
    """The results of several libraries."""

    results: list[Result] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Libraries that could not be imported, each with the reason."""
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    python: str = field(default_factory=platform.python_version)

    def add(self, other: Report) -> None:
        """Add the results of another interpreter for libraries that are missing here."""
        names = {result.name for result in self.results}
        self.results += [result for result in other.results if result.name not in names]
        self.missing = {name: why for name, why in self.missing.items() if name in other.missing}

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, with the sentences of the cases."""
        return {
            "date": self.date,
            "python": self.python,
            "cases": {
                case.number: {"title": case.title, "sentence": case.sentence, "expected": case.expected}
                for case in CASES
            },
            "results": [
                {
                    "name": result.name,
                    "version": result.version,
                    "outcomes": {number: outcome.to_json() for number, outcome in result.outcomes.items()},
                }
                for result in self.results
            ],
            "missing": self.missing,
        }

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report from the text of `to_json`."""
        read = json.loads(text)
        results = [
            Result(r["name"], r["version"], {number: Outcome(**fields) for number, fields in r["outcomes"].items()})
            for r in read["results"]
        ]
        return cls(results, read["missing"], read["date"], read["python"])


def ask(adapter: Adapter, cases: Sequence[Case] = CASES, progress: Progress | None = None, target: str = "") -> Result:
    """Run the cases on one library; each difference gets its reproduction."""
    outcomes: dict[str, Outcome] = {}
    for case in cases:
        if progress is not None:
            progress(adapter.name, case.number)
        outcome = case.run(adapter)
        if outcome.status == DIFFERS:
            outcome = replace(outcome, reproduction=_reproduction(adapter, case, target))
        outcomes[case.number] = outcome
    return Result(adapter.name, adapter.version, outcomes)


def _reproduction(adapter: Adapter, case: Case, target: str) -> str:
    if reproduction := REPRODUCTIONS.get(adapter.name, {}).get(case.number):
        return reproduction.code
    if not target:
        return ""
    module, _, attribute = target.partition(":")
    imports = f"from {module} import {attribute}\nfrom relive_conformance import case"
    return f"{imports}\ncase({case.number!r}).require({attribute})"


SYMBOLS = {PASSES: "✓", DIFFERS: "✗", NOT_OFFERED: "·"}


def markdown(report: Report) -> str:
    """Return the report as a Markdown page."""
    return "\n".join(_markdown(report)) + "\n"


def summary(report: Report) -> Iterator[str]:
    """Yield the lines of a Markdown table with a row per case and a column per library."""
    yield "| case | " + " | ".join(f"{r.name} {r.version}" for r in report.results) + " |"
    yield "|---|" + ":-:|" * len(report.results)
    for case in CASES:
        cells = (SYMBOLS[r.outcomes[case.number].status] for r in report.results if case.number in r.outcomes)
        yield f"| {case.name}{' †' * case.misuse} | " + " | ".join(cells) + " |"
    yield "| **passes** | " + " | ".join(str(r.count(PASSES)) for r in report.results) + " |"
    yield "| **differs** | " + " | ".join(str(r.count(DIFFERS)) for r in report.results) + " |"


def _markdown(report: Report) -> Iterator[str]:
    names = {case.number: case.name for case in CASES}
    yield "# Conformance: the table"
    yield ""
    yield f"Written by `relive-conformance` on {report.date}, Python {report.python}. [What it means](conformance.md)."
    yield f"{SYMBOLS[PASSES]} passes, {SYMBOLS[DIFFERS]} differs, {SYMBOLS[NOT_OFFERED]} not offered. "
    yield "† Misuse: input that no documentation allows."
    yield ""
    yield from summary(report)
    yield ""
    yield "## The cases"
    yield ""
    for case in CASES:
        yield f"- **{case.name}**: {case.sentence} Expected: {case.expected}."
    for result in report.results:
        if result.differences:
            yield ""
            yield f"## {result.name} {result.version}"
            yield ""
            yield f"Seen on {report.date}."
        for number, outcome in result.differences.items():
            yield ""
            yield f"**{names[number]}**: expected {outcome.expected}, got {outcome.got}."
            if outcome.reproduction:
                yield ""
                yield f"```python\n{outcome.reproduction}\n```"
            if reproduction := REPRODUCTIONS.get(result.name, {}).get(number):
                yield ""
                yield f"prints\n\n```\n{reproduction.prints}\n```"
