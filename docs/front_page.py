"""Writes the figures of the README's first screens: from docs/conformance.json and the newest kept training results.

Run it as `python docs/front_page.py` after either has changed; a test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from relive.conformance import case
from relive.conformance.outcome import PASSES
from relive.conformance.report import SYMBOLS, Report

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TELLING = [case(number) for number in ("T2", "T7", "T9", "T12", "T28")]
TRAININGS = {
    "PPO": "PPO, CartPole, 40,000 steps",
    "DQN": "DQN, CartPole, 30,000 steps",
    "SAC": "SAC, Pendulum, 6,000 steps",
}
_BESIDE = "\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}"
BEFORE, AFTER = "Stable-Baselines3", "relive"


def conformance() -> Iterator[str]:
    """A line for each library: how many cases, and the most telling ones."""
    report = Report.from_json((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))
    telling = (f"{one.title} ({one.number})" for one in TELLING)
    yield f"| | {_BESIDE.join(SYMBOLS.values())} | " + " | ".join(telling) + " |"
    yield "|---|" + ":-:|" * (1 + len(TELLING))
    for result in sorted(report.results, key=lambda result: -result.count(PASSES)):
        counts = _BESIDE.join(str(result.count(status)) for status in SYMBOLS)
        cells = [counts, *(SYMBOLS[result.outcomes[one.number].status] for one in TELLING)]
        yield f"| {result.name} | " + " | ".join(cells) + " |"


def trainings() -> Iterator[str]:
    """A line for each algorithm: means over seeds, before → after."""
    newest = max((ROOT / "benchmarks" / "results").glob("training-*.json"))
    runs = json.loads(newest.read_text(encoding="utf-8"))["runs"]

    def change(task: str, name: str, form: str) -> str:
        figures = (
            mean(run[name] for run in runs if (run["task"], run["library"]) == (task, library))
            for library in (BEFORE, AFTER)
        )
        return " → ".join(format(figure, form) for figure in figures)

    yield "| | bytes of the buffer | CPU seconds in it | of the whole training |"
    yield "|---|--:|--:|--:|"
    for task, told in TRAININGS.items():
        columns = ("held_bytes", ",.0f"), ("buffer_seconds", ".2f"), ("seconds", ".1f")
        yield f"| {told} | " + " | ".join(change(task, *column) for column in columns) + " |"


def written(page: str) -> str:
    """The page with both tables as the kept results have them."""
    for table in (conformance, trainings):
        mark = f"<!-- {table.__name__}: docs/front_page.py -->"
        place = re.compile(f"{re.escape(mark)}\n.*?\n\n", re.DOTALL)
        lines = "\n".join(table())
        page, found = place.subn(lambda _, mark=mark, lines=lines: f"{mark}\n{lines}\n\n", page)
        if found != 1:
            raise ValueError(f"README: expected {mark} and a table below it once, got it {found} times.")
    return page


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
