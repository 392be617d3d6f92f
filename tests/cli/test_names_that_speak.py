"""Names and ids that a terminal or rich would obey: they are shown."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import relive as rl
from relive.cli import main
from relive.errors import escaped, explain
from relive.fields import schema
from relive.inspector.terminal import render
from relive.statistics import observers

CLEARS = "\x1b[2J\x1b]0;title\x07\x9b31m\u202efdp\r"
MARKUP = "x[/a][bold red]y[/]"


def test_control_characters_are_shown() -> None:
    said = escaped(CLEARS)
    assert said == r"\x1b[2J\x1b]0;title\x07\x9b31m\u202efdp\r"
    assert escaped("Ünï\tcode\n✓ [/a]") == "Ünï\tcode\n✓ [/a]"
    assert explain(CLEARS, "a name", CLEARS, "Rename it.").isprintable()


@pytest.mark.parametrize("name", [CLEARS, MARKUP], ids=["controls", "markup"])
def test_a_report_shows_the_names_of_fields_reasons_and_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (schema, observers):  # which refuse such names
        monkeypatch.setattr(module, "NAME", re.compile(".*", re.DOTALL))
    stats = rl.EpisodeStats(None, metrics=(name,), reasons=())
    replay = rl.ReplayBuffer(8, 2, 1, extra={name: ()}, stats=stats, seed=0)
    for t in range(4):
        replay.add(np.zeros(2), np.zeros(1), 0.0, t == 3, False, np.zeros(2), **{name: 1.0})
    report = rl.inspect(replay)
    assert escaped(name) in str(report)
    assert not set(str(report)) & set("\x1b\x07\x9b\u202e\r")
    told = {**report.as_dict(), "source": {**report.as_dict()["source"], "id": name, "path": name}}
    screen = StringIO()
    Console(file=screen, width=200, highlight=False, force_terminal=True, color_system=None).print(render(told))
    assert screen.getvalue().count(escaped(name)) >= 3
    assert "\x1b]" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_errors_show_what_a_path_would_do(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "no\x1b[2Jfolder[/a]")]) == 1
    assert r"no\x1b[2Jfolder[/a]" in capsys.readouterr().err
