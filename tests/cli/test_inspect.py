"""`recollect inspect PATH`: the report, as text, JSON or a page, and exit codes."""

import json
from pathlib import Path

import pytest

import recollect as rc
from recollect.cli import main
from tests.inspector.test_page import data_of, walk


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
    assert found == rc.inspect(saved).as_dict()
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
    assert "recollect inspect: " in capsys.readouterr().err
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
