"""Rounds, ratios and bars of contestants with made-up durations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import devices, launch_peers
from benchmarks.bars import Bar
from benchmarks.report import Result, judge
from benchmarks.timing import Contestant, Effort, fastest_peer, measured, race, speedup

RNG = np.random.default_rng(0)


def test_everybody_runs_in_every_round_and_is_reset_before() -> None:
    seen: list[str] = []
    contestants = [
        Contestant(name, "peer", lambda name=name: seen.append(name), reset=lambda name=name: seen.append(f"-{name}"))
        for name in "ab"
    ]
    timings = race(contestants, Effort(rounds=6, fewest_rounds=2, seconds=10.0, sample_seconds=0.0), RNG)
    assert [sorted(timing.samples) for timing in timings] == [list(range(6))] * 2
    assert all(f"-{after}" == before for before, after in zip(seen[::2], seen[1::2], strict=True))
    assert seen.count("a") == seen.count("b") == 3 + 6, "three times to warm up"


def test_a_ratio_is_that_of_the_medians_with_its_interval() -> None:
    ours, theirs = measured("we", "ours", [1.0, 2.0, 3.0]), measured("they", "peer", [10.0, 10.0, 10.0])
    interval = speedup(ours, theirs, RNG)
    assert interval.ratio == 5.0
    assert (interval.low, interval.high) == (pytest.approx(10 / 3), 10.0)


def test_ratios_are_of_the_rounds_in_which_both_ran() -> None:
    slow = measured("they", "peer", [8.0])
    assert speedup(measured("we", "ours", [2.0, 50.0, 50.0]), slow, RNG).ratio == 4.0


def test_the_fastest_peer_is_no_limit_and_not_the_one_aside() -> None:
    timings = [measured("we", "ours", [1]), measured("memcpy", "limit", [1])]
    timings += [measured("a", "peer", [2]), measured("b", "peer", [3])]
    for aside, expected in ((None, "a"), ("a", "b")):
        found = fastest_peer(timings, aside)
        assert found is not None
        assert found.contestant.name == expected


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (2.5, False)])
def test_a_bar_is_met_or_not(monkeypatch: pytest.MonkeyPatch, ours: float, met: bool) -> None:
    monkeypatch.setitem(__import__("benchmarks.bars").bars.BARS, "made up", Bar(4.0, times_memcpy=2.0))
    timings = [measured("we", "ours", [ours]), measured("they", "peer", [8.0]), measured("copy", "limit", [0.9])]
    (line,) = [line for line in judge(Result("made up", timings), RNG) if line.timing.contestant.role == "ours"]
    assert line.verdict is met
    assert line.of_limit is not None
    assert line.of_limit.ratio == pytest.approx(0.9 / ours)


def test_the_calls_of_a_device_are_timed_and_written_as_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_peers, "installed_peers", lambda *_: iter(()))
    monkeypatch.setattr(devices, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(devices, "CALLS", ("replay add", "rollout add"))
    target = tmp_path / "cpu.json"
    assert devices.main(["--device", "cpu", "--quick", "--json", str(target)]) == 0
    times = json.loads(target.read_text())["times"]
    assert list(times) == ["replay add", "rollout add"]
    assert all(0 < returned <= done for found in times.values() for done, returned in found.values())
    assert "| replay add | " in target.with_suffix(".md").read_text()
