"""Reports and commands where rich is not installed: pages, JSON and a short text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relive as rl
from relive.checkpoint import progress

WITHOUT_RICH = """
import sys
sys.modules["rich"] = None  # importing it, or a module of it, is an ImportError
import relive as rl
from relive.cli import main

folder, page = sys.argv[1:]
report = rl.inspect(folder, html=page)
assert "<table" in report._repr_html_()
print(report)
print("---")
codes = [main(["inspect", folder]), main(["inspect", folder, "--json"]), main(["check", folder]), main(["version"])]
assert codes == [0, 0, 0, 0], codes
"""


def test_a_report_is_a_short_text_and_the_page_is_written(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(9, obs=1, action=(), seed=0)
    for t in range(4):
        replay.add([t], 0.0, 1.0, t == 3, False, [t + 1])
    replay.save(tmp_path / "run")
    page = tmp_path / "page.html"
    command = [sys.executable, "-W", "error", "-c", WITHOUT_RICH, str(tmp_path / "run"), str(page)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert page.read_text("utf-8").startswith("<!doctype html>")
    report, _, contents = ended.stdout.partition("---\n")
    lines = report.splitlines()
    assert lines[0] == "Report"
    assert "! The reward is 1 in every row." in lines
    assert any(line.split() == ["episodes:", "ends", "terminated", "1", "(100", "%)"] for line in lines)
    assert any(line.split() == ["obs", "float32[1]", "0", "1.5", "3", "1.118"] for line in lines)
    assert contents.startswith(report), "the command shows the same"
    assert ended.stderr.count('run pip install "relive[cli]" for the whole report') == 1


def test_long_calls_have_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    parts = [np.zeros(3), np.zeros(4)]
    assert list(progress.show_progress(iter(parts), 7, "saving rows")) == parts
