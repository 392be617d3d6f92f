"""`relive bench`: which suites run, what is said of those that cannot, and exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from relive.cli import bench, main
from tests.benchmarks.runs import run

suites: Any = bench._suites()
"""Of the installed package, or of the source tree."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands of the suites, which only write an empty results file here."""
    commands: list[list[str]] = []

    def start(command: list[str], check: bool) -> Any:
        commands.append(command)
        Path(command[command.index("--json") + 1]).write_text(json.dumps(run({})))
        return subprocess.CompletedProcess(command, int("disk" in command[2]))

    monkeypatch.setattr(suites.subprocess, "run", start)
    monkeypatch.setattr(suites, "RESULTS", tmp_path)
    return commands


def test_the_suites_asked_for_run_one_after_the_other(started: list[list[str]], tmp_path: Path) -> None:
    assert main(["bench", "--quick", "--only", "replay,memory", "--json", str(tmp_path / "all.json")]) == 0
    assert [command[2].split(".")[-2:] for command in started] == [["benchmarks", "replay"], ["benchmarks", "memory"]]
    assert all(command[-1] == "--quick" for command in started)
    assert set(json.loads((tmp_path / "all.json").read_text())) == {"replay", "memory"}
    assert all(Path(command[4]).name.startswith("local-") for command in started), "quick runs are not kept"


def test_a_suite_that_fails_does_not_stop_the_others(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--only", "disk,replay"]) == 1
    assert len(started) == 2
    assert "failed: disk" in capsys.readouterr().out


def test_a_suite_whose_library_is_missing_says_how_to_get_it(
    started: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "find_spec", lambda name: None)
    assert main(["bench", "--only", "ray_service"]) == 2
    assert 'skipped ray_service: it needs ray: pip install ".[ray]"' in capsys.readouterr().out
    assert not started


def test_a_wrong_name_lists_the_suites(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--only", "speed"])
    assert stop.value.code == 2
    assert "expected some of on_policy, replay" in capsys.readouterr().err


def test_where_there_are_no_benchmarks_a_sentence_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_MODULES", ("relive.nowhere",))
    assert main(["bench", "--quick"]) == 2
    assert (
        "expected the benchmarks of relive, got neither relive.benchmarks nor a folder benchmarks"
        in capsys.readouterr().err
    )


def test_every_suite_can_be_started_and_says_what_it_is_for() -> None:
    for suite in suites.SUITES:
        assert (Path(suites.__file__).parent / f"{suite}.py").exists()
