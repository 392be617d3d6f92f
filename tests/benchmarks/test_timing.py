"""Rounds, ratios and bars, of contestants whose durations are made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bars import Bar, bar_of
from benchmarks.memcpy import memcpy_of
from benchmarks.report import Result, judge, write_json
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


def test_cases_of_a_kind_share_a_bar() -> None:
    assert bar_of("shared memory: add, obs(17), 2 writers, 0 samplers") == Bar(3.0)
    assert bar_of("something else") is None


def test_the_limit_copies_as_many_bytes() -> None:
    limit = memcpy_of(1000, units=10)
    limit.run()
    assert (limit.role, limit.units) == ("limit", 10)
    source, target = (cell.cell_contents for cell in limit.run.__closure__ or ())
    assert source.nbytes == target.nbytes == 1000
    assert np.array_equal(source, target)


def test_a_results_file_has_every_line_with_its_ratios(tmp_path: Path) -> None:
    result = Result("case", [measured("we", "ours", [1e-6, 2e-6, 3e-6]), measured("they", "peer", [4e-6] * 3)])
    path = tmp_path / "deep" / "run.json"
    write_json(path, [(result, judge(result, RNG))], {"date": "2026"})
    line = json.loads(path.read_text())["cases"]["case"]["timings"]["we"]
    assert line["median_us"] == pytest.approx(2.0)
    assert line["times_fastest_peer"]["ratio"] == pytest.approx(2.0)
    assert line["times_limit"] is None
