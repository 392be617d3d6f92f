"""The suite "adapters": who is timed, what is said of the others, and originals in another interpreter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import adapters
from benchmarks.adapter_cases import Case
from benchmarks.bars import bar_of


def broken() -> Any:
    raise RuntimeError("no such buffer")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """An original called `pretended`, with the cases of this list."""
    found: list[Case] = []
    module: Any = ModuleType("benchmarks.adapter_cases.pretended")
    module.cases = lambda: found
    monkeypatch.setitem(sys.modules, "pretended", ModuleType("pretended"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(adapters, "ORIGINALS", {"pretended": "Pretended", "nowhere": "Nowhere"})
    monkeypatch.setattr("benchmarks.machine.is_busy", lambda: False)
    return found


def run(tmp_path: Path, *more: str) -> dict[str, Any]:
    path = tmp_path / "found.json"
    assert adapters.main(["--quick", "--json", str(path), *more]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_both_sides_are_timed_and_a_missing_original_is_named(
    cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases += [Case("add", lambda: lambda: None, lambda: lambda: sum(range(2000)))]
    found = run(tmp_path)
    timings = found["cases"]["Pretended: add"]["timings"]
    assert {name: timing["role"] for name, timing in timings.items()} == {"relive": "ours", "Pretended": "peer"}
    assert timings["relive"]["times_fastest_peer"]["ratio"] > 2
    assert found["missing"] == {"Nowhere": "not installed"}
    assert found["peers"] == {"Pretended": "a source tree"}
    assert "not timed Nowhere: not installed" in capsys.readouterr().out


def test_a_side_that_does_not_start_is_reported_and_the_others_are_timed(cases: list[Case], tmp_path: Path) -> None:
    cases += [
        Case("add", lambda: lambda: None, broken),
        Case("sample", lambda: lambda: None, lambda: lambda: None),
    ]
    found = run(tmp_path)["cases"]
    assert found["Pretended: add"]["refused"] == {"Pretended": "RuntimeError: no such buffer"}
    assert len(found["Pretended: sample"]["timings"]) == 2


def test_cases_that_cannot_be_imported_are_not_called_a_missing_original(
    cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.adapter_cases.pretended")
    assert run(tmp_path)["missing"]["Pretended"] == "No module named 'benchmarks.adapter_cases.pretended'"


def test_an_unknown_original_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        adapters.main(["--only", "keras"])
    assert "expected some of agilerl,apexrl" in capsys.readouterr().err


def test_every_adapter_has_the_bar_of_its_original() -> None:
    for title in adapters.ORIGINALS.values():
        bar = bar_of(f"{title}: add")
        assert bar is not None
        assert bar.times_faster == 1.0


@pytest.mark.thorough
def test_what_is_missing_here_is_timed_with_another_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is this one, with an original on its path that this process does not have."""
    original = tmp_path / "elsewhere" / "rl_buffer"
    original.mkdir(parents=True)
    (original / "__init__.py").write_text("")
    spied = tmp_path / "python"
    spied.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{original.parent}" exec {sys.executable} "$@"\n')
    spied.chmod(0o755)
    monkeypatch.setattr("benchmarks.machine.is_busy", lambda: False)
    plain = adapters.copy_sources

    def with_cases(folder: Path) -> None:
        plain(folder)
        code = "from . import Case\ndef cases():\n    return [Case('add', lambda: int, lambda: int)]\n"
        (folder / "benchmarks" / "adapter_cases" / "rl_buffer.py").write_text(code)

    monkeypatch.setattr(adapters, "copy_sources", with_cases)
    found = run(tmp_path, "--only", "rl_buffer", "--python", str(spied))
    assert list(found["cases"]) == ["rl-buffer: add"]
    assert found["missing"] == {}
    assert found["peers"] == {"rl-buffer": "a source tree"}
    assert found["elsewhere"][0]["peers"] == {"rl-buffer": "a source tree"}


def test_an_interpreter_that_fails_is_told() -> None:
    with pytest.raises(SystemExit, match="ended with 1. It needs the dependencies of relive"):
        adapters.run_elsewhere("false", ["rl_buffer"], quick=True)
