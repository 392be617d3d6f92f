"""`recollect check PATH`: a line for each checkpoint, and an exit code."""

from pathlib import Path

import pytest

from recollect.cli import main
from tests.faults.checkpoint.disk import old_checkpoint


def test_whole_checkpoints_have_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old_checkpoint("uniform", tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1: whole\n2: whole\n"


def test_a_damaged_checkpoint_is_told_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old_checkpoint("rollout", tmp_path)
    state = tmp_path / "state" / "00000001.bin"
    state.write_bytes(bytes(state.stat().st_size))
    assert main(["check", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1: state/00000001.bin, bytes 0 to ")
    assert second == "2: whole"


def test_where_nothing_was_saved_the_answer_is_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nowhere")]) == 1
    assert "expected a folder of checkpoints, got none" in capsys.readouterr().out
