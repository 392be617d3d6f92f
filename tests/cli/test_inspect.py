"""`relive inspect PATH`: the report, as text, JSON or a page, and exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl
from relive.cli import main
from tests.inspector.test_page import data_of, walk


class Own(rl.Uniform):
    """A sampler that no checkpoint can name."""


@pytest.fixture
def saved(tmp_path: Path) -> str:
    walk([3, 5]).save(tmp_path / "run")
    return str(tmp_path / "run")


def test_a_checkpoint_is_told_in_words(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", saved]) == 0
    text = capsys.readouterr().out
    assert "stored   2, 2 of them whole" in text
    assert "terminated 1 (50 %), truncated 1 (50 %)" in text
    assert "\x1b" not in text


def test_json_is_the_report_and_nothing_else(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", saved, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == rl.inspect(saved).as_dict()
    assert found["episodes"]["returns"]["mean"] == (3 + 10) / 2


def test_a_page_is_written_where_it_is_asked_for(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "report.html"
    assert main(["inspect", saved, "--html", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    assert data_of(page)["source"]["path"] == saved
    assert main(["inspect", saved, "--html", str(page), "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_what_cannot_be_read_is_said_with_exit_code_one(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "relive inspect: " in capsys.readouterr().err
    for state in (tmp_path / "run" / "state").iterdir():
        state.write_bytes(bytes(state.stat().st_size))
    assert main(["inspect", saved, "--json"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "state/" in told.err
    (tmp_path / "file").write_text("")
    walk([3]).save(tmp_path / "other")
    assert main(["inspect", str(tmp_path / "other"), "--html", str(tmp_path / "file" / "page.html")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def disk_memory(root: Path, sampler: Any) -> rl.ReplayBuffer:
    """Ten steps, two episodes, row 3 drawn by far the most often."""
    replay = rl.ReplayBuffer(20, obs=1, action=(), sampler=sampler, device=rl.Memory.disk(root), seed=0)
    for t in range(10):
        replay.add([t], 0, t, t == 4, t == 9, [t + 1])
    return replay


@pytest.mark.skipif(not hasattr(rl.kernels.native(), "ProcessLock"), reason="disk memory needs the native core")
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize(
    "sampler",
    [rl.Uniform(), rl.Prioritized(), rl.Prioritized(beta=float), rl.Counted(rl.Prioritized(beta=float)), Own()],
    ids=["uniform", "prioritized", "a function", "counted", "own"],
)
def test_disk_memory_is_read_and_left_as_it_is(
    sampler: Any, is_closed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = disk_memory(tmp_path, sampler)
    if isinstance(sampler, rl.Prioritized):
        replay.update_priority(torch.arange(5), torch.tensor([1.0, 1, 1, 1e9, 1]))
    if is_closed:
        replay.close()
    del replay  # as if killed
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episodes"]["returns"]["mean"] == (10 + 35) / 2
    assert found["episodes"]["ends"] == {"terminated": 1, "truncated": 1, "cut": 0, "running": 0}
    assert ("counted" in found["reuse"]) == isinstance(sampler, rl.Counted)
    if isinstance(sampler, rl.Prioritized):
        assert found["priorities"]["rows_with"]["60%"] == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(not hasattr(rl.kernels.native(), "ProcessLock"), reason="disk memory needs the native core")
def test_disk_memory_that_is_in_use_is_said_with_exit_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk_memory(tmp_path, rl.Uniform()) as replay:
        assert main(["inspect", str(tmp_path)]) == 1
        assert "expected one process at a time, got a folder that another process uses" in capsys.readouterr().err
        assert len(replay) == 10


def test_eighty_columns_are_enough_for_the_fields(
    saved: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    replay = rl.ReplayBuffer(999, obs=12, action=4, seed=0)
    rows = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    for t in range(199):
        replay.add(rows[t], rows[t, :4], -1234.5 - t, False, False, rows[t + 1])
    replay.save(saved + "-wide")
    assert main(["inspect", saved + "-wide"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text.partition("Fields")[2].partition("Priorities")[0].partition("Reuse")[0]
    assert max(map(len, text.splitlines())) <= 80
