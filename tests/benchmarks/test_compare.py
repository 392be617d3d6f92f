"""What got slower since another run: ratios within runs, and only beyond chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import changes, main, remarks
from tests.benchmarks.runs import run, timing


def of(ratio: tuple[float, float, float], **more: Any) -> dict[str, Any]:
    return run({"uniform": {"relive": timing("ours", 10.0, ratio), "rlox": timing("peer", 50.0, (1, 1, 1))}}, **more)


def test_a_ratio_that_fell_beyond_both_intervals_is_slower() -> None:
    (change,) = changes(of((5.0, 4.8, 5.2)), of((3.0, 2.9, 3.1)))
    assert change.is_slower
    assert str(change) == "slower: uniform, relive: 5.00 → 3.00 times as fast as the fastest peer"


def test_a_ratio_that_rose_is_faster() -> None:
    (change,) = changes(of((3.0, 2.9, 3.1)), of((5.0, 4.8, 5.2)))
    assert not change.is_slower


def test_intervals_that_meet_are_chance() -> None:
    assert not list(changes(of((5.0, 4.0, 5.2)), of((4.0, 3.5, 4.1))))


def test_a_slower_machine_changes_nothing() -> None:
    after = of((5.0, 4.8, 5.2))
    for line in after["cases"]["uniform"]["timings"].values():
        line["median_us"] *= 10
    assert not list(changes(of((5.0, 4.8, 5.2)), after))


def test_without_peers_the_limit_is_compared_with() -> None:
    def alone(ratio: float) -> dict[str, Any]:
        interval = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
        return run({"gae": {"relive": timing("ours", 10.0, times_limit=interval)}})

    (change,) = changes(alone(0.8), alone(0.4))
    assert "0.80 → 0.40 times as fast as the limit" in str(change)


def test_peers_and_cases_of_one_run_only_are_passed_over() -> None:
    before, after = of((5.0, 4.8, 5.2)), of((5.0, 4.8, 5.2))
    after["cases"]["new"] = after["cases"]["uniform"]
    after["cases"]["uniform"]["timings"]["rlox"]["times_fastest_peer"] = {"ratio": 0.1, "low": 0.1, "high": 0.1}
    assert not list(changes(before, after))


def test_the_worst_comes_first() -> None:
    def two(first: float, second: float) -> dict[str, Any]:
        ratios = {"a": first, "b": second}
        return run({case: {"relive": timing("ours", 1.0, (r, r, r))} for case, r in ratios.items()})

    assert [change.case for change in changes(two(4.0, 4.0), two(3.0, 1.0))] == ["b", "a"]


def test_another_machine_a_busy_one_and_other_peers_are_said() -> None:
    before = of((1, 1, 1), peers={"rlox": "1", "cpprb": "2"})
    after = of((1, 1, 1), peers={"rlox": "1", "skrl": "3"}, quick=True)
    after["machine"] = {**after["machine"], "cpu": "Abacus 10", "busy": True}
    said = list(remarks(before, after))
    assert "another machine: cpu Abacus 9 → Abacus 10" in said
    assert "others used the machine in the run after" in said
    assert "the run after was a quick one" in said
    assert "other peers: without cpprb, skrl" in said


def test_the_command_exits_with_one_if_something_got_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(of((5.0, 4.8, 5.2))))
    after.write_text(json.dumps(of((3.0, 2.9, 3.1))))
    assert main([str(before), str(after)]) == 1
    assert "slower: uniform, relive" in capsys.readouterr().out
    assert main([str(before), str(before)]) == 0
    assert "nothing changed by more than chance" in capsys.readouterr().out
