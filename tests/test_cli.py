"""The command line: commands, exit codes, help, Ctrl-C, and names with control characters."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import relive
import relive as rl
from relive.cli import main
from relive.errors import escape_controls, explain
from relive.inspector.terminal import render_report
from relive.schema import fields
from relive.statistics import observers
from tests.faults.checkpoint.disk import save_old_checkpoint
from tests.inspector.test_page import read_page_data, walk


def test_ctrl_c_ends_with_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("relive.cli.verify", interrupted)
    assert main(["check", "anywhere"]) == 130
    assert capsys.readouterr().err == "\nrelive check: stopped by Ctrl-C.\n"


def test_version_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    text = capsys.readouterr().out
    assert f"relive     {relive.__version__}" in text
    assert torch.__version__ in text
    assert main(["version", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert parts["relive"] == relive.__version__
    assert parts["kernels"] == relive.kernels.backend()


def test_the_version_equals_pyproject() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{relive.__version__}"\n' in project


def test_python_dash_m_is_the_same_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["relive", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(Path(relive.__file__).with_name("__main__.py")), run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"relive {relive.__version__}\n"


@pytest.mark.thorough
def test_a_closed_output_pipe_prints_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "relive", "version"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: <command>"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["check"], "the following arguments are required: PATH"),
        (["conformance", "--cases", "T99"], "expected cases from T1 to T28, got T99"),
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_without_relive_conformance_the_error_names_the_installation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relive.cli.find_spec", lambda name: None)
    assert main(["conformance", "--help"]) == 2
    assert capsys.readouterr().err == (
        "relive conformance: expected the package relive-conformance, got none. "
        "Run pip install ./conformance in a clone of relive.\n"
    )


def test_relive_conformance_runs_the_separate_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--json", "--cases", "T1", "--libraries", "relive"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["outcomes"] == {"T1": {"status": "pass"}}
    with pytest.raises(SystemExit) as stop:
        main(["conformance", "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: relive conformance [-h]")


def test_check_prints_a_line_per_intact_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_old_checkpoint("uniform", tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1: whole\n2: whole\n"
    assert main(["check", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"checkpoint": n, "whole": True, "wrong": None} for n in (1, 2)]


def test_check_names_the_damaged_file_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_old_checkpoint("rollout", tmp_path)
    state = tmp_path / "state" / "00000001.bin"
    state.write_bytes(bytes(state.stat().st_size))
    assert main(["check", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1: state/00000001.bin, bytes 0 to ")
    assert second == "2: whole"
    assert main(["check", str(tmp_path), "--json"]) == 1
    contents = json.loads(capsys.readouterr().out)
    assert [(each["whole"], each["wrong"]) for each in contents] == [(False, first.removeprefix("1: ")), (True, None)]


def test_checking_an_empty_folder_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nowhere")]) == 1
    assert "relive check: " in (contents := capsys.readouterr()).err
    assert "expected a folder of checkpoints, got no folder" in contents.err


@pytest.mark.parametrize("on_disk", [False, True])
def test_check_accepts_rows_of_a_sampler_that_cannot_be_loaded(
    on_disk: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if on_disk:
        pytest.importorskip("relive.kernels._native", reason="this install has no native core (no compiler)")
    device = rl.Memory.disk(tmp_path) if on_disk else "cpu"
    replay = rl.ReplayBuffer(9, 1, 1, sampler=rl.Prioritized(beta=lambda _: 0.5), device=device)
    replay.add([1.0], [0.0], 1.0, False, False, [2.0])
    replay.close() if on_disk else replay.save(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(": whole\n")


class Own(rl.Uniform):
    """A custom sampler, which a checkpoint cannot rebuild."""


@pytest.fixture
def saved_run(tmp_path: Path) -> str:
    walk([3, 5]).save(tmp_path / "run")
    return str(tmp_path / "run")


def test_inspect_describes_a_checkpoint(saved_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", saved_run]) == 0
    text = capsys.readouterr().out
    assert "stored   2, 2 of them whole" in text
    assert "terminated 1 (50 %), truncated 1 (50 %)" in text
    assert "\x1b" not in text


def test_json_is_the_report_and_nothing_else(saved_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", saved_run, "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual == rl.inspect(saved_run).as_dict()
    assert actual["episodes"]["returns"]["mean"] == (3 + 10) / 2


def test_inspect_writes_a_page_to_the_given_path(
    saved_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "report.html"
    assert main(["inspect", saved_run, "--html", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    assert read_page_data(page)["source"]["path"] == saved_run
    assert main(["inspect", saved_run, "--html", str(page), "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_inspecting_an_unreadable_path_exits_with_one(
    saved_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "relive inspect: " in capsys.readouterr().err
    for state in (tmp_path / "run" / "state").iterdir():
        state.write_bytes(bytes(state.stat().st_size))
    assert main(["inspect", saved_run, "--json"]) == 1
    contents = capsys.readouterr()
    assert contents.out == ""
    assert "state/" in contents.err
    (tmp_path / "file").write_text("")
    walk([3]).save(tmp_path / "other")
    assert main(["inspect", str(tmp_path / "other"), "--html", str(tmp_path / "file" / "page.html")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def disk_memory(root: Path, sampler: Any) -> rl.ReplayBuffer:
    """Return a buffer of ten steps in two episodes, in which row 3 is drawn most often."""
    replay = rl.ReplayBuffer(20, obs=1, action=(), sampler=sampler, device=rl.Memory.disk(root), seed=0)
    for t in range(10):
        replay.add([t], 0, t, t == 4, t == 9, [t + 1])
    return replay


@pytest.mark.skipif(not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="disk memory needs the native core")
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize(
    "sampler",
    [rl.Uniform(), rl.Prioritized(), rl.Prioritized(beta=float), rl.Counted(rl.Prioritized(beta=float)), Own()],
    ids=["uniform", "prioritized", "a function", "counted", "own"],
)
def test_inspect_reads_disk_memory_without_changing_it(
    sampler: Any, is_closed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = disk_memory(tmp_path, sampler)
    if isinstance(sampler, rl.Prioritized):
        replay.update_priority(torch.arange(5), torch.tensor([1.0, 1, 1, 1e9, 1]))
    if is_closed:
        replay.close()
    # Without `close`, the files are as a killed process leaves them.
    del replay
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["episodes"]["returns"]["mean"] == (10 + 35) / 2
    assert actual["episodes"]["ends"] == {"terminated": 1, "truncated": 1, "cut": 0, "running": 0}
    assert ("counted" in actual["reuse"]) == isinstance(sampler, rl.Counted)
    if isinstance(sampler, rl.Prioritized):
        assert actual["priorities"]["rows_with"]["60%"] == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="disk memory needs the native core")
def test_inspecting_disk_memory_in_use_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with disk_memory(tmp_path, rl.Uniform()) as replay:
        assert main(["inspect", str(tmp_path)]) == 1
        assert "expected one process at a time, got a folder that another process uses" in capsys.readouterr().err
        assert len(replay) == 10


def test_inspect_fits_80_columns(
    saved_run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    replay = rl.ReplayBuffer(999, obs=12, action=4, seed=0)
    rows = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    for t in range(199):
        replay.add(rows[t], rows[t, :4], -1234.5 - t, False, False, rows[t + 1])
    replay.save(saved_run + "-wide")
    assert main(["inspect", saved_run + "-wide"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text.partition("Fields")[2].partition("Priorities")[0].partition("Reuse")[0]
    assert max(map(len, text.splitlines())) <= 80


CLEARS = "\x1b[2J\x1b]0;title\x07\x9b31m\u202efdp\r"
MARKUP = "x[/a][bold red]y[/]"


def test_control_characters_are_shown() -> None:
    said = escape_controls(CLEARS)
    assert said == r"\x1b[2J\x1b]0;title\x07\x9b31m\u202efdp\r"
    assert escape_controls("Ünï\tcode\n✓ [/a]") == "Ünï\tcode\n✓ [/a]"
    assert explain(CLEARS, "a name", CLEARS, "Rename it.").isprintable()


@pytest.mark.parametrize("name", [CLEARS, MARKUP], ids=["controls", "markup"])
def test_a_report_shows_the_names_of_fields_reasons_and_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both modules would refuse the name.
    for module in (fields, observers):
        monkeypatch.setattr(module, "NAME_PATTERN", re.compile(".*", re.DOTALL))
    stats = rl.EpisodeStats(None, metrics=(name,), reasons=())
    replay = rl.ReplayBuffer(8, 2, 1, extra={name: ()}, stats=stats, seed=0)
    for t in range(4):
        replay.add(np.zeros(2), np.zeros(1), 0.0, t == 3, False, np.zeros(2), **{name: 1.0})
    report = rl.inspect(replay)
    assert escape_controls(name) in str(report)
    assert not set(str(report)) & set("\x1b\x07\x9b\u202e\r")
    contents = {**report.as_dict(), "source": {**report.as_dict()["source"], "id": name, "path": name}}
    screen = StringIO()
    Console(file=screen, width=200, highlight=False, force_terminal=True, color_system=None).print(
        render_report(contents)
    )
    assert screen.getvalue().count(escape_controls(name)) >= 3
    assert "\x1b]" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_errors_escape_control_characters_of_a_path(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "no\x1b[2Jfolder[/a]")]) == 1
    assert r"no\x1b[2Jfolder[/a]" in capsys.readouterr().err
