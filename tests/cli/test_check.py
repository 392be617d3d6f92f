"""`relive check PATH`: a line for each checkpoint, and an exit code."""

import json
from pathlib import Path

import pytest

import relive as rl
from relive.cli import main
from tests.faults.checkpoint.disk import old_checkpoint


def test_whole_checkpoints_have_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old_checkpoint("uniform", tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1: whole\n2: whole\n"
    assert main(["check", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"checkpoint": n, "whole": True, "wrong": None} for n in (1, 2)]


def test_a_damaged_checkpoint_is_told_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old_checkpoint("rollout", tmp_path)
    state = tmp_path / "state" / "00000001.bin"
    state.write_bytes(bytes(state.stat().st_size))
    assert main(["check", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1: state/00000001.bin, bytes 0 to ")
    assert second == "2: whole"
    assert main(["check", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [(each["whole"], each["wrong"]) for each in told] == [(False, first.removeprefix("1: ")), (True, None)]


def test_where_nothing_was_saved_the_answer_is_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nowhere")]) == 1
    assert "relive check: " in (told := capsys.readouterr()).err
    assert "expected a folder of checkpoints, got no file FORMAT in it" in told.err


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_sampler_that_only_its_maker_can_make_again_does_not_make_rows_less_whole(
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
