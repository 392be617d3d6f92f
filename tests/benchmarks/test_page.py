"""The page that is written from kept results, and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import page
from benchmarks.plots import duration
from benchmarks.suite import last_kept
from tests.benchmarks.runs import run, timing

UNIFORM = {
    "relive": timing("ours", 12.5, (4.0, 3.9, 4.1), met=True, times_limit={"ratio": 0.4, "low": 0.3, "high": 0.5}),
    "rlox": timing("peer", 50.0, (1.0, 1.0, 1.0)),
    "memcpy of the same bytes": timing("limit", 5.0),
}


def keep(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_a_kept_run_becomes_a_table_with_bars_spread_and_limit(tmp_path: Path) -> None:
    keep(tmp_path, "replay-2026-01-02T0304.json", run({"uniform": UNIFORM}, peers={"rlox": "1.2"}))
    text = page(tmp_path)
    assert "| uniform | *memcpy of the same bytes* | 5 µs | 4.5 µs–5.5 µs |" in text
    assert "|  | **relive** | 12.5 µs | 11.2 µs–13.8 µs | 4.00 (3.90–4.10) | 0.40 | ≥ 4 | yes |" in text
    assert "2026-01-02; Abacus 9, 2 cores, 2 torch threads; Python 3.11.0, rlox 1.2." in text
    assert "## On-policy" not in text, "of which there is no run"


def test_a_busy_machine_and_a_library_that_was_refused_are_said(tmp_path: Path) -> None:
    content = run({"uniform": UNIFORM})
    content["machine"]["busy"] = True
    content["cases"]["uniform"]["refused"] = {"skrl": "next_obs is not what was stored"}
    keep(tmp_path, "replay-2026-01-02T0304.json", content)
    text = page(tmp_path)
    assert "**Other jobs used the machine**" in text
    assert "Not timed at uniform: skrl, next_obs is not what was stored." in text


def test_memory_has_its_bar(tmp_path: Path) -> None:
    line = {"role": "ours", "held": 7069.5, "resident": None, "met": True, "wrong": None}
    memory = {"memory image": {"bar": 7120.0, "libraries": {"relive, Stacked": line}}}
    keep(tmp_path, "memory-2026-01-02T0304.json", run({}, memory=memory))
    assert "| memory image | **relive, Stacked** | 7,069.5 | – | ≤ 7,120 | yes |  |" in page(tmp_path)


def test_the_newest_kept_run_counts_and_local_ones_do_not(tmp_path: Path) -> None:
    for name, date in (
        ("replay-2026-01-01", "old"),
        ("replay-2026-02-01", "new"),
        ("local-replay-2026-03-01", "quick"),
    ):
        keep(tmp_path, f"{name}T0000.json", {"date": date})
    found = last_kept("replay", tmp_path)
    assert found is not None
    assert found["date"] == "new"
    assert last_kept("disk", tmp_path) is None


def test_pictures_are_drawn_of_cases_and_of_curves(tmp_path: Path) -> None:
    imread = pytest.importorskip("matplotlib.image", reason="needs matplotlib to read pictures").imread
    keep(tmp_path, "replay-2026-01-02T0304.json", run({"uniform": UNIFORM, "prioritized": UNIFORM}))
    points = [
        {"operation": "gae", "library": library, "axis": axis, "size": size, "median_us": us * size}
        | {"p25_us": us, "p75_us": 2 * us * size}
        for axis in ("T", "N") for size in (16, 64, 256) for library, us in (("relive", 1.0), ("rlox", 9.0))
    ]  # fmt: skip
    keep(tmp_path, "scaling-2026-01-02T0304.json", run({}, points=points))
    images = tmp_path / "images"
    text = page(tmp_path, images)
    for name in ("performance_replay.png", "performance_scaling.png"):
        assert f"(images/{name})" in text
        picture = imread(images / name)
        assert picture.shape[0] > 100
        assert picture[..., :3].std() > 0.05, "something is drawn"


@pytest.mark.parametrize(
    ("micros", "shown"), [(0.25, "250 ns"), (1.0, "1 µs"), (123.4, "123 µs"), (1234.0, "1.23 ms"), (2.5e6, "2.5 s")]
)
def test_durations_have_the_unit_that_suits_them(micros: float, shown: str) -> None:
    assert duration(micros) == shown
