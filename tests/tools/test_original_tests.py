"""The tool that runs other libraries' test suites on our adapters and counts the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.adapters import ORIGINALS
from tools.original_tests import SUITES, Counts, Suite, count_results, run

KEPT = json.loads((Path(__file__).parents[2] / "docs" / "migrating" / "originals.json").read_text(encoding="utf-8"))


def test_skipped_tests_do_not_count_and_failed_ones_are_named() -> None:
    cases = """<testcase name="a"/><testcase name="b"><skipped/></testcase><testcase name="c"><failure/></testcase>
               <testcase name="d"><error/></testcase>"""
    assert count_results(f"<testsuites><testsuite>{cases}</testsuite></testsuites>") == Counts(1, 3, ["c", "d"])


def checkout(place: Path, lines: str) -> Path:
    """Return a clone with one test file."""
    (place / "tests").mkdir(parents=True)
    (place / "tests" / "test_storage.py").write_text(lines)
    return place


@pytest.mark.thorough
def test_the_tests_of_a_checkout_run_with_our_classes(tmp_path: Path) -> None:
    lines = """
from rsl_rl.storage import RolloutStorage
def test_whose(): assert RolloutStorage.__module__.startswith("relive.compat.rsl_rl")
def test_wrong(): assert RolloutStorage is None
"""
    suite = Suite("tests", ("test_storage.py",))
    assert run("rsl_rl", suite, checkout(tmp_path, lines), sys.executable) == Counts(1, 2, ["test_wrong"])


def test_every_suite_and_every_kept_entry_is_of_a_known_original() -> None:
    assert {suite.page or name for name, suite in SUITES.items()} == KEPT.keys() == ORIGINALS.keys()
    assert {name: entry["title"] for name, entry in KEPT.items()} == ORIGINALS
    for suite in SUITES.values():
        assert suite.source.count("/") == 1
        assert len(suite.commit) >= 7
    kept = {name: told["of"] for entry in KEPT.values() for name, told in entry["tests"].items()}
    assert kept == {name: SUITES[name].about for name in kept}
