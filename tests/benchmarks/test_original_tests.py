"""The originals' own tests on our adapters: what is rewritten, counted and kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.adapters import ORIGINALS
from benchmarks.original_tests import SUITES, Suite, counted, keep, prefixed, run

KEPT = json.loads((Path(__file__).parents[2] / "docs" / "migrating" / "originals.json").read_text(encoding="utf-8"))


def test_imports_of_the_chosen_modules_get_our_prefix() -> None:
    code = """
from rsl_rl.storage import RolloutStorage
import rsl_rl.storage.rollout_storage as module
    from rsl_rl.storage.rollout_storage import RolloutStorage
from rsl_rl.storage_of_others import X
from rsl_rl.models import MLPModel
text = "from rsl_rl.storage import"
"""
    changed = prefixed(code, ["rsl_rl.storage"])
    assert [line for line in changed.splitlines() if "relive" in line] == [
        "from relive.compat.rsl_rl.storage import RolloutStorage",
        "import relive.compat.rsl_rl.storage.rollout_storage as module",
        "    from relive.compat.rsl_rl.storage.rollout_storage import RolloutStorage",
    ]
    assert changed.replace("relive.compat.", "") == code


def test_skipped_tests_do_not_count() -> None:
    report = '<testsuites><testsuite tests="9" skipped="2" failures="3" errors="1"/></testsuites>'
    assert counted(report) == (3, 7)


def test_the_tests_of_a_checkout_run_with_our_classes(tmp_path: Path) -> None:
    tests = tmp_path / "checkout" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_storage.py").write_text(
        "from rsl_rl.storage import RolloutStorage\n"
        "def test_whose(): assert RolloutStorage.__module__.startswith('relive.compat.rsl_rl')\n"
        "def test_wrong(): assert RolloutStorage is None\n"
    )
    suite = Suite("tests", ("test_storage.py",), ("rsl_rl.storage",))
    assert run(suite, tests.parent, sys.executable) == (1, 2)


def test_counts_are_kept_beside_what_was_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "originals.json"
    path.write_text(json.dumps({"rsl_rl": {"title": "rsl_rl", "tests": {"passed": 1, "total": 9, "of": "storage"}}}))
    keep("rsl_rl", 8, 9, path)
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept == {"rsl_rl": {"title": "rsl_rl", "tests": {"passed": 8, "total": 9, "of": "storage"}}}
    with pytest.raises(SystemExit, match="expected an entry for agilerl. Add one"):
        keep("agilerl", 1, 1, path)


def test_every_suite_and_every_kept_entry_is_of_a_known_original() -> None:
    assert SUITES.keys() <= ORIGINALS.keys()
    assert {name: entry["title"] for name, entry in KEPT.items()} == {name: ORIGINALS[name] for name in KEPT}
