"""Trainings with the originals' trainers: which there are, where they run, and what is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tools import original_trainers
from tools.original_trainers import WITH_TRAINERS, Elsewhere, keep, main, train, trainers_of
from tools.trainer_cases import Trainer


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """One trainer that notes whose storage it would make and its seed, and draws."""
    calls: list[tuple[str, int]] = []

    def note(seed: int) -> float:
        storage: Any = import_module("rsl_rl.algorithms.ppo").RolloutStorage
        calls.append((storage.__module__.partition(".")[0], seed))
        return float(original_trainers.np.random.random())

    monkeypatch.setattr(original_trainers, "trainers_of", lambda _: {"X": Trainer("X", "a task", note)})
    return calls


def test_both_sides_start_from_the_same_seed(invented: list[tuple[str, int]]) -> None:
    theirs, ours, another = (
        train("rsl_rl", "X", side, seed) for side, seed in (("original", 3), ("relive", 3), ("relive", 4))
    )
    assert invented == [("rsl_rl", 3), ("relive", 3), ("relive", 4)]
    assert theirs == ours != another


def test_every_original_with_trainers_lists_them_with_a_task() -> None:
    for original in WITH_TRAINERS:
        trainers = trainers_of(original)
        assert len(trainers) >= 2
        assert all(trainer.task and isinstance(trainer.train, Callable) for trainer in trainers.values())


@pytest.mark.thorough
def test_a_process_of_its_own_answers_with_its_last_line(tmp_path: Path) -> None:
    elsewhere = Elsewhere(tmp_path, sys.executable, [])
    assert json.loads(elsewhere.run("rsl_rl", "--list")).keys() == trainers_of("rsl_rl").keys()
    with pytest.raises(SystemExit, match="ended with"):
        elsewhere.run("rsl_rl", "--one", "unknown", "relive", "0")


def test_the_figures_of_a_trainer_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "originals.json"
    path.write_text(json.dumps({"rsl_rl": {"title": "rsl_rl", "trainings": {"PPO": {"task": "old"}}}}))
    keep("rsl_rl", "PPO", {"original": [1.0], "relive": [2.0]}, "pucks", path)
    assert json.loads(path.read_text())["rsl_rl"]["trainings"] == {
        "PPO": {"task": "pucks", "original": [1.0], "relive": [2.0]}
    }


def test_the_trainers_of_one_original_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agilerl", "--list"]) == 0
    assert "Rainbow" in capsys.readouterr().out
