"""The demo with a tiny bound: what it prints, saves and leaves behind."""

import sys
from collections.abc import Generator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from examples.demo import __main__ as command
from examples.demo.__main__ import main
from examples.demo.cartpole import Report, Settings, trailing_mean, train
from tests.inspector.test_page import data_of

TINY = Settings(max_transitions=2000)


@pytest.fixture
def small_demo(tmp_path: Path) -> list[str]:
    return ["--steps", "2_000", "--seed", "3", "--out", str(tmp_path / "tiny")]


def test_demo_tells_the_story_and_trains_until_the_bound(
    small_demo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
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
    monkeypatch.setattr(command, "Settings", Easy)
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
    assert main(["--no-train"]) == 0
    assert "PPO" not in capsys.readouterr().out


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
    report = command.watch(console, train(TINY, seed=1), TINY)
    text = file.getvalue()
    assert "return" in text
    assert "buffer" in text
    assert "━" in text
    assert len(command.describe(report)) + 13 <= 80


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LINE_EVERY", 1000)
    console = Console(file=StringIO(), width=80)
    command.watch(console, train(TINY, seed=1), TINY)
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

    monkeypatch.setattr(command, "LINE_EVERY", 1)
    with pytest.raises(OSError, match="disk full"):
        command.watch(Broken(file=StringIO()), reports(), TINY)
    assert closed


def test_trailing_mean_takes_as_many_as_there_are() -> None:
    assert trailing_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1, 2, 4, 6]
