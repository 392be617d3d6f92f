"""The originals' own tests on our adapters: how they are run, counted and kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.adapters import ORIGINALS
from tools.original_tests import SUITES, Found, Suite, counted, keep, main, parsed, parser_of, run

KEPT = json.loads((Path(__file__).parents[2] / "docs" / "migrating" / "originals.json").read_text(encoding="utf-8"))


def test_an_interpreter_below_this_folder_is_found_from_another_and_stays_that_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    options = parsed(parser_of("original_tests", ""), ["--python", "agilerl=bin/python"])
    assert options.python == {"agilerl": str(tmp_path / "bin" / "python")}


def test_skipped_tests_do_not_count_and_failed_ones_are_named() -> None:
    cases = """<testcase name="a"/><testcase name="b"><skipped/></testcase><testcase name="c"><failure/></testcase>
               <testcase name="d"><error/></testcase>"""
    assert counted(f"<testsuites><testsuite>{cases}</testsuite></testsuites>") == Found(1, 3, ["c", "d"])


def checkout(place: Path, lines: str) -> Path:
    """A clone with one file of tests."""
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
    assert run("rsl_rl", suite, checkout(tmp_path, lines), sys.executable) == Found(1, 2, ["test_wrong"])


def test_a_package_that_is_not_installed_and_one_that_is_absent_are_found(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "uninstalled.py").write_text("here = 1")
    lines = "import uninstalled, a_simulator.scene\ndef test_it(): assert uninstalled.here == 1\n"
    suite = Suite("tests", ("",), absent=("a_simulator", "a_simulator.scene"))
    found = run("rsl_rl", suite, checkout(tmp_path / "clone", lines), sys.executable, [tmp_path / "elsewhere"])
    assert found == Found(1, 1, [])


def test_counts_are_kept_beside_what_is_known_already(tmp_path: Path) -> None:
    path = tmp_path / "originals.json"
    path.write_text(json.dumps({"rsl_rl": {"title": "rsl_rl", "tests": {"other": {}}}}))
    suite = Suite("tests", (), about="storage")
    keep("rsl_rl", suite, Found(8, 9, ["test_x"]), path)
    told = {"passed": 8, "total": 9, "of": "storage", "failed": ["test_x"]}
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "rsl_rl": {"title": "rsl_rl", "tests": {"other": {}, "rsl_rl": told}}
    }
    with pytest.raises(SystemExit, match="expected an entry for agilerl. Add one"):
        keep("agilerl", suite, Found(1, 1, []), path)


def test_what_is_missing_or_unknown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["rsl_rl", "--checkouts", str(tmp_path)])
    assert "rsl_rl: not run" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["rsl_rl", "--python", "unknown=python"])
    assert "got unknown" in capsys.readouterr().err


def test_every_suite_and_every_kept_entry_is_of_a_known_original() -> None:
    assert {suite.page or name for name, suite in SUITES.items()} == KEPT.keys() == ORIGINALS.keys()
    assert {name: entry["title"] for name, entry in KEPT.items()} == ORIGINALS
    for suite in SUITES.values():
        assert suite.source.count("/") == 1
        assert len(suite.commit) >= 7
    kept = {name: told["of"] for entry in KEPT.values() for name, told in entry["tests"].items()}
    assert kept == {name: SUITES[name].about for name in kept}
