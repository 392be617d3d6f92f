"""Report cases that became slower or faster between two runs: `python -m benchmarks.compare BEFORE.json AFTER.json`.

Machines differ and have slow days, so the comparison uses ratios within each run, not durations: ours to the fastest
peer, or to the physical limit without a peer. A change counts if the bootstrap intervals of both do not overlap.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

_BESIDE = {"times_fastest_peer": "the fastest peer", "times_limit": "the limit"}


@dataclass(frozen=True)
class Change:
    """A timing of ours whose ratio changed."""

    case: str
    library: str
    beside: str
    before: float
    after: float

    @property
    def is_slower(self) -> bool:
        return self.after < self.before

    def __str__(self) -> str:
        word = "slower" if self.is_slower else "faster"
        speeds = f"{self.before:.2f} → {self.after:.2f} times as fast as {self.beside}"
        return f"{word}: {self.case}, {self.library}: {speeds}"


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
    """Yield our timings whose ratios differ by more than chance between the runs, worst first."""
    found = []
    for case, now in after.get("cases", {}).items():
        then = before.get("cases", {}).get(case, {"timings": {}})
        for name, timing in now["timings"].items():
            if timing["role"] == "ours" and name in then["timings"]:
                found.append(_change(case, name, then["timings"][name], timing))
    yield from sorted(filter(None, found), key=lambda change: change.after / change.before)


def _change(case: str, name: str, before: dict[str, Any], after: dict[str, Any]) -> Change | None:
    for key, beside in _BESIDE.items():
        old, new = before.get(key), after.get(key)
        if old and new:
            apart = new["high"] < old["low"] or old["high"] < new["low"]
            return Change(case, name, beside, old["ratio"], new["ratio"]) if apart else None
    return None


def remarks(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield reasons why the comparison is weak."""
    for run, name in ((before, "before"), (after, "after")):
        if run["machine"].get("busy"):
            yield f"others used the machine in the run {name}"
        if run.get("quick"):
            yield f"the run {name} was a quick one"
    for what in ("cpu", "cores", "torch_threads"):
        old, new = before["machine"].get(what), after["machine"].get(what)
        if old != new:
            yield f"another machine: {what} {old} → {new}"
    gone = before.get("peers", {}).keys() - after.get("peers", {}).keys()
    come = after.get("peers", {}).keys() - before.get("peers", {}).keys()
    if gone or come:
        yield f"other peers: {', '.join([*(f'without {name}' for name in sorted(gone)), *sorted(come)])}"


def show_changes(before: dict[str, Any] | None, after: dict[str, Any], console: Console) -> None:
    """Print the comparison with the last kept run, or that there is none."""
    if before is None:
        console.print("no kept run to compare with")
        return
    console.print(f"beside the run of {before['date'][:10]}:", highlight=False)
    for remark in remarks(before, after):
        console.print(f"  [yellow]({remark})[/yellow]", highlight=False)
    found = list(changes(before, after))
    for change in found:
        console.print(f"  [{'red' if change.is_slower else 'green'}]{change}[/]", highlight=False, soft_wrap=True)
    if not found:
        console.print("  nothing changed by more than chance", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two results files; the exit code is 1 if something became slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    for name in ("before", "after"):
        parser.add_argument(name, type=Path, help="a results file")
    options = parser.parse_args(arguments)
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (options.before, options.after))
    show_changes(before, after, Console())
    return int(any(change.is_slower for change in changes(before, after)))


if __name__ == "__main__":
    raise SystemExit(main())
