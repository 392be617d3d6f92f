"""The command line as a user meets it: exit codes, help, Ctrl-C, and a demo with a tiny bound."""

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

import relive
from relive.cli import COMMANDS, main
from relive.cli.demo import cartpole, progress
from relive.cli.demo.cartpole import Report, Settings, train
from tests.inspector.test_page import data_of

TINY = Settings(max_transitions=2000)


@pytest.fixture
def small_demo(tmp_path: Path) -> list[str]:
    return ["demo", "--steps", "2_000", "--seed", "3", "--out", str(tmp_path), "--name", "tiny"]


def test_demo_tells_the_story_and_trains_until_the_bound(
    small_demo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(small_demo) == 1
    text = capsys.readouterr().out
    assert "one learns -8 from a step that never happened" in text
    assert "not solved within --steps" in text
    assert "\x1b" not in text, "no live updates where there is no terminal"
    picture = tmp_path / "tiny" / "learning_curve.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_says_how_to_get_the_picture_without_matplotlib(
    small_demo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(small_demo) == 1
    assert 'pip install ".[plots]" in a clone of relive' in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "tiny").iterdir()] == ["report.html"]


def test_demo_ends_with_a_page_about_its_own_run(
    small_demo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_demo) == 1
    page = tmp_path / "tiny" / "report.html"
    assert f"report on the last rollout: {page}" in capsys.readouterr().out
    data = data_of(page)
    assert data["source"]["kind"] == "RolloutBuffer"
    assert data["episodes"]["stats"]["steps"] >= 2000, "every episode of the run"
    assert data["browser"]["series"][:4] == ["reward", "value", "advantage", "return"]


@dataclass(frozen=True)
class Easy(Settings):
    target: float = 15.0


def test_a_solved_demo_exits_with_zero(
    small_demo: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relive.cli.demo.Settings", Easy)
    assert main([*small_demo, "--steps", "20000"]) == 0
    text = capsys.readouterr().out
    assert "result       solved" in text
    assert "over the last 100 episodes, goal 15" in text


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_cartpole_is_solved(seed: int) -> None:
    *_, report = train(Settings(), seed)
    assert report.solved


def test_the_timeline_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--no-train"]) == 0
    assert "PPO" not in capsys.readouterr().out


def test_ctrl_c_ends_with_a_sentence(
    small_demo: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cartpole, "_update", interrupted)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert main(small_demo) == 130
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().err == "\nrelive demo: stopped by Ctrl-C.\n"


def test_training_leaves_the_seed_and_the_threads_as_they_were() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for _ in train(TINY, seed=1):
        pass
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_the_same_seed_plays_the_same_episodes() -> None:
    def finished(seed: int) -> list[object]:
        *_, report = train(TINY, seed)
        return [column.tolist() for column in report.stats.episodes().values()]

    assert finished(1) == finished(1)
    assert finished(1) != finished(2)


def test_the_buffers_share_of_the_time_is_a_share() -> None:
    *_, report = train(TINY, seed=1)
    assert 0 < report.buffer_share < 1
    assert TINY.max_transitions <= report.stats.num_steps < TINY.max_transitions + 8 * TINY.num_steps


def test_a_terminal_sees_a_bar() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    report = progress.watch(console, train(TINY, seed=1), TINY)
    text = file.getvalue()
    assert "return" in text
    assert "buffer" in text
    assert "━" in text
    assert len(progress.describe(report)) + 13 <= 80


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 1000)
    console = Console(file=StringIO(), width=80)
    progress.watch(console, train(TINY, seed=1), TINY)
    assert isinstance(console.file, StringIO)
    assert len(console.file.getvalue().splitlines()) == 2


def test_watching_closes_the_training_even_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def reports() -> Generator[Report]:
        try:
            yield from train(TINY, seed=1)
        finally:
            closed.append(True)

    class Broken(Console):
        def print(self, *_: object, **__: object) -> None:
            raise OSError("disk full")

    monkeypatch.setattr(progress, "LINE_EVERY", 1)
    with pytest.raises(OSError, match="disk full"):
        progress.watch(Broken(file=StringIO()), reports(), TINY)
    assert closed


def test_version_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    text = capsys.readouterr().out
    assert f"relive     {relive.__version__}" in text
    assert torch.__version__ in text
    assert main(["version", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert parts["relive"] == relive.__version__
    assert parts["kernels"] == relive.kernels.backend()


def test_the_version_is_that_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{relive.__version__}"\n' in project


def test_the_version_alone_is_asked_for_as_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"relive {relive.__version__}\n"


def test_python_dash_m_is_the_same_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["relive", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(Path(relive.__file__).with_name("__main__.py")), run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"relive {relive.__version__}\n"


@pytest.mark.thorough
def test_a_reader_that_goes_away_is_no_traceback() -> None:
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
        (["demo", "--steps", "0"], "expected a positive number, got 0"),
        (["demo", "--steps", "many"], "invalid"),
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_said_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["conformance", "--cases", "T1", "--libraries", "ours", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "relive conformance: " in (told := capsys.readouterr()).err
    assert told.out == ""


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert command.__name__.rsplit(".", 1)[-1] in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__.rsplit(".", 1)[-1])
def test_the_help_of_a_command_describes_it_every_option_and_its_exit_codes(command: ModuleType) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    command.register(commands)
    (parser,) = commands.choices.values()
    assert (parser.description or "").endswith(".")
    assert all(action.help for action in parser._actions)
    assert "Exit code" in (parser.epilog or "") or parser.prog.endswith("version")


def test_a_command_is_a_module_that_registers_itself() -> None:
    for command in COMMANDS:
        commands = argparse.ArgumentParser().add_subparsers()
        command.register(commands)
        (parser,) = commands.choices.values()
        assert callable(parser.get_default("run"))
