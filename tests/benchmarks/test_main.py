"""`python -m benchmarks`: which suites run, what is said of those that cannot, and exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as suites
from benchmarks import devices, launch_peers
from benchmarks.__main__ import main
from tests.benchmarks.runs import run


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
    assert main(["--quick", "--only", "replay,memory", "--json", str(tmp_path / "all.json")]) == 0
    assert [command[2].split(".")[-2:] for command in started] == [["benchmarks", "replay"], ["benchmarks", "memory"]]
    assert all(command[-1] == "--quick" for command in started)
    assert set(json.loads((tmp_path / "all.json").read_text())) == {"replay", "memory"}
    assert all(Path(command[4]).name.startswith("local-") for command in started), "quick runs are not kept"


def test_a_suite_that_fails_does_not_stop_the_others(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", "disk,replay"]) == 1
    assert len(started) == 2
    assert "failed: disk" in capsys.readouterr().out


def test_a_suite_whose_library_is_missing_says_how_to_get_it(
    started: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "find_spec", lambda name: None)
    assert main(["--only", "ray_service"]) == 2
    assert 'skipped ray_service: it needs ray: pip install ".[ray]"' in capsys.readouterr().out
    assert not started


def test_a_device_is_passed_on_to_its_suite(started: list[list[str]]) -> None:
    assert main(["--device", "cpu", "--fasttd3", "there.py"]) == 0
    (command,) = started
    assert command[2].endswith("devices")
    assert command[-4:] == ["--device", "cpu", "--fasttd3", "there.py"]


def test_without_the_device_a_sentence_says_so(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert main(["--device", "cuda"]) == 2
    assert "skipped devices: expected a device cuda, got none" in capsys.readouterr().out
    assert not started


def test_the_calls_of_a_device_are_timed_and_written_as_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_peers, "found", lambda *_: iter(()))
    monkeypatch.setattr(devices, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(devices, "CALLS", ("replay add", "rollout add"))
    target = tmp_path / "cpu.json"
    assert devices.main(["--device", "cpu", "--quick", "--json", str(target)]) == 0
    times = json.loads(target.read_text())["times"]
    assert list(times) == ["replay add", "rollout add"]
    assert all(0 < returned <= done for found in times.values() for done, returned in found.values())
    page = target.with_suffix(".md").read_text()
    assert "(`cpu`)" in page
    assert "| replay add | " in page


def test_a_wrong_name_lists_the_suites(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--only", "speed"])
    assert stop.value.code == 2
    assert "expected some of on_policy, replay" in capsys.readouterr().err


def test_every_suite_can_be_started_and_says_what_it_is_for() -> None:
    for suite in suites.SUITES:
        assert (Path(suites.__file__).parent / f"{suite}.py").exists()
