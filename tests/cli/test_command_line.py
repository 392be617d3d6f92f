"""The command line as a user meets it: exit codes, help, Ctrl-C."""

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import relive
from relive.cli import COMMANDS, check, conformance, main


def test_ctrl_c_ends_with_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "examined", interrupted)
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
        (["check"], "the following arguments are required: PATH"),
        (["conformance", "--cases", "T99"], "expected cases from T1 to T28, got T99"),
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


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


def test_without_relive_conformance_a_sentence_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "find_spec", lambda name: None)
    assert main(["conformance", "--help"]) == 2
    assert capsys.readouterr().err == (
        "relive conformance: expected the package relive-conformance, got none. "
        "Run pip install ./conformance in a clone of relive.\n"
    )


def test_conformance_is_the_command_of_its_own_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--json", "--cases", "T1", "--libraries", "relive"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["outcomes"] == {"T1": {"status": "pass"}}
    with pytest.raises(SystemExit) as stop:
        main(["conformance", "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: relive conformance [-h]")


def test_a_command_is_a_module_that_registers_itself() -> None:
    for command in COMMANDS:
        commands = argparse.ArgumentParser().add_subparsers()
        command.register(commands)
        (parser,) = commands.choices.values()
        assert callable(parser.get_default("run"))
