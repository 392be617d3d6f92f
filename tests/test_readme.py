"""What the README prints, runs, and its figures are those that are kept."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import relive as rl

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGE = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_of_the_readme_run_as_printed() -> None:
    loop, replay, recurrent, actors = BLOCKS
    names: dict[str, Any] = {}
    exec(compile(loop, str(README), "exec"), names)
    assert names["rollout"].is_full
    assert len(names["rollout"].final_obs) == len(names["final_value"])
    assert sum(1 for line in loop.splitlines() if line and not line.startswith(("import", "#"))) <= 20
    exec(compile(replay, str(README), "exec"), names)
    assert len(names["replay"]) == 1_000
    assert [len(episode) for episode in names["replay"].episodes()] == [100] * 10
    exec(compile(recurrent, str(README), "exec"), names)
    assert names["steps"][0].shape[1:] == (16, 3)
    assert names["state"].shape[1:] == (32,)
    assert names["rollout"].stats.summary()["episodes"] == 24
    if hasattr(rl.kernels.native(), "ProcessLock"):
        exec(compile(actors, str(README), "exec"), names)
        assert names["batch"]["next_obs"].tolist() == [[1.0] * 3] * 32


@pytest.mark.filterwarnings("default")  # of what Stable-Baselines3 stands on
@pytest.mark.parametrize(("side", "owner"), [("-", "stable_baselines3"), ("+", "relive.compat.stable_baselines3")])
def test_both_sides_of_the_one_line_change_train(side: str, owner: str) -> None:
    pytest.importorskip("stable_baselines3")
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    code = "\n".join(line[1:] for line in block.splitlines() if line[:1] in (" ", side))
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    buffer = names["model"].replay_buffer
    assert type(buffer).__module__.startswith(owner)
    assert buffer.size() > 200


def test_the_tables_are_those_of_the_kept_results() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "front_page.py"))["written"]
    assert written(PAGE) == PAGE, "run python docs/front_page.py"


def test_the_table_of_libraries_counts_the_kept_cases() -> None:
    kept = json.loads((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))
    for result in kept["results"]:
        said = [outcome["status"] for outcome in result["outcomes"].values()]
        counts = [said.count(status) for status in ("pass", "differs", "not offered")]
        assert sum(counts) == len(kept["cases"]), result["name"]
        (row,) = re.findall(rf"^\| {re.escape(result['name'])} \|(.*)\|$", PAGE, re.MULTILINE)
        assert re.findall(r"\d+", row.split("|")[0]) == [str(count) for count in counts], result["name"]


def test_the_bytes_beside_stable_baselines3_are_those_of_the_newest_run() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("training-*.json"))
    runs = json.loads(newest.read_text(encoding="utf-8"))["runs"]
    held = {(run["task"], run["library"]): f"{run['held_bytes']:,}" for run in runs}
    for task in ("PPO", "DQN", "SAC"):
        assert f"| {held[task, 'Stable-Baselines3']} → {held[task, 'relive']} |" in PAGE, task


def test_every_file_that_the_readme_names_is_there() -> None:
    linked = re.findall(r'\]\(([^)#:]+)\)|src="([^":]+)"', PAGE)
    assert len(linked) > 20
    for path in (first or second for first, second in linked):
        assert (ROOT / path).exists(), path
