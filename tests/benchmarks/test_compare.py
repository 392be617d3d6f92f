"""The comparison of two runs uses ratios within each run, and reports changes beyond chance only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import changes, main


def run(ratio: tuple[float, float, float], median: float = 10.0) -> dict[str, Any]:
    """Return a results file with one case; `ratio` is our speed over that of the fastest peer, with its interval."""
    interval = dict(zip(("ratio", "low", "high"), ratio, strict=True))
    ours = {"role": "ours", "median_us": median, "times_fastest_peer": interval, "times_limit": None}
    machine = {"cpu": "Abacus 9", "cores": 2, "torch_threads": 2, "busy": False, "versions": {}}
    cases = {"uniform": {"timings": {"relive": ours}}}
    return {"suite": "replay", "date": "2026", "machine": machine, "peers": {}, "cases": cases}


@pytest.mark.parametrize(
    ("before", "after", "slower"),
    [
        ((5.0, 4.8, 5.2), (3.0, 2.9, 3.1), [True]),
        ((3.0, 2.9, 3.1), (5.0, 4.8, 5.2), [False]),
        ((5.0, 4.0, 5.2), (4.0, 3.5, 4.1), []),  # the intervals overlap
    ],
)
def test_a_ratio_changed_when_both_intervals_are_apart(before: Any, after: Any, slower: list[bool]) -> None:
    assert [change.is_slower for change in changes(run(before), run(after))] == slower


def test_a_slower_machine_changes_nothing() -> None:
    assert not list(changes(run((5.0, 4.8, 5.2)), run((5.0, 4.8, 5.2), median=100.0)))


def test_the_command_exits_with_one_if_something_got_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(run((5.0, 4.8, 5.2))))
    after.write_text(json.dumps(run((3.0, 2.9, 3.1))))
    assert main([str(before), str(after)]) == 1
    assert "slower: uniform, relive: 5.00 → 3.00 times as fast as the fastest peer" in capsys.readouterr().out
    assert main([str(before), str(before)]) == 0
