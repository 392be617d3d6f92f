"""The tool that runs other libraries' trainers: both sides start with the same seed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tools import original_trainers
from tools.original_trainers import WITH_TRAINERS, train, trainers_of
from tools.trainer_cases import Trainer


def test_both_sides_start_from_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def note(seed: int) -> float:
        """Record the package of the storage class and the seed; return a random number."""
        storage: Any = import_module("rsl_rl.algorithms.ppo").RolloutStorage
        calls.append((storage.__module__.partition(".")[0], seed))
        return float(original_trainers.np.random.random())

    monkeypatch.setattr(original_trainers, "trainers_of", lambda _: {"X": Trainer("X", "a task", note)})
    theirs, ours, another = (
        train("rsl_rl", "X", side, seed) for side, seed in (("original", 3), ("relive", 3), ("relive", 4))
    )
    assert calls == [("rsl_rl", 3), ("relive", 3), ("relive", 4)]
    assert theirs == ours != another


def test_every_original_with_trainers_lists_them_with_a_task() -> None:
    for original in WITH_TRAINERS:
        trainers = trainers_of(original)
        assert len(trainers) >= 2
        assert all(trainer.task and callable(trainer.train) for trainer in trainers.values())
