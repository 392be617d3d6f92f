"""The tools that run other libraries' tests and trainers on our adapters: honest counts, equal seeds."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools import original_trainers
from tools.original_tests import Counts, Suite, count_results, run
from tools.trainer_cases import Trainer


def test_skipped_tests_do_not_count_and_failed_ones_are_named() -> None:
    cases = """<testcase name="a"/><testcase name="b"><skipped/></testcase><testcase name="c"><failure/></testcase>
               <testcase name="d"><error/></testcase>"""
    assert count_results(f"<testsuites><testsuite>{cases}</testsuite></testsuites>") == Counts(1, 3, ["c", "d"])


@pytest.mark.thorough
def test_the_tests_of_a_clone_run_with_our_classes(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_storage.py").write_text("""
from rsl_rl.storage import RolloutStorage
def test_whose(): assert RolloutStorage.__module__.startswith("relive.compat.rsl_rl")
def test_wrong(): assert RolloutStorage is None
""")
    suite = Suite("tests", ("test_storage.py",))
    assert run("rsl_rl", suite, tmp_path, sys.executable) == Counts(1, 2, ["test_wrong"])


def test_both_sides_start_from_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def record(seed: int) -> float:
        """Record the package of the storage class and the seed; return a random number."""
        storage = import_module("rsl_rl.algorithms.ppo").RolloutStorage
        calls.append((storage.__module__.partition(".")[0], seed))
        return float(original_trainers.np.random.random())

    monkeypatch.setattr(original_trainers, "load_trainers", lambda _: {"X": Trainer("X", "a task", record)})
    sides = (("original", 3), ("relive", 3), ("relive", 4))
    original, ours, other_seed = (original_trainers.train("rsl_rl", "X", side, seed) for side, seed in sides)
    assert calls == [("rsl_rl", 3), ("relive", 3), ("relive", 4)]
    assert original == ours != other_seed
