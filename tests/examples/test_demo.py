"""The demo with few steps: its output, its files, and restored global state."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from examples.demo import __main__ as command
from examples.demo import replay
from examples.demo.__main__ import main
from examples.demo.cartpole import Settings, train
from tests.inspector.test_page import read_page_data


@pytest.fixture
def small_demo(tmp_path: Path) -> list[str]:
    return ["--steps", "2_000", "--seed", "3", "--out", str(tmp_path)]


def test_the_demo_prints_the_timeline_trains_and_writes_a_page(
    small_demo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert main(small_demo) == 1
    text = capsys.readouterr().out
    assert "one learns -8 from a step that never happened" in text
    assert "not solved within --steps" in text
    assert "\x1b" not in text, "no live updates where there is no terminal"
    assert (tmp_path / "learning_curve.png").exists()
    data = read_page_data(tmp_path / "report.html")
    assert data["source"]["kind"] == "RolloutBuffer"
    assert data["episodes"]["stats"]["steps"] >= 2000, "every episode of the run"
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_no_train_skips_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-train"]) == 0
    assert "PPO" not in capsys.readouterr().out


@dataclass(frozen=True)
class Easy(Settings):
    target: float = 15.0


@pytest.mark.thorough
def test_a_solved_demo_exits_with_zero_also_without_matplotlib(
    small_demo: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Settings", Easy)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*small_demo, "--steps", "20000"]) == 0
    text = capsys.readouterr().out
    assert "over the last 100 episodes, goal 15" in text
    assert 'pip install ".[plots]" in a clone of relive' in text


@pytest.mark.thorough
def test_the_same_seed_plays_the_same_episodes() -> None:
    def play_episodes(seed: int) -> list[object]:
        *_, report = train(Settings(max_transitions=2000), seed)
        return [column.tolist() for column in report.stats.episodes().values()]

    assert play_episodes(1) == play_episodes(1)
    assert play_episodes(1) != play_episodes(2)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_cartpole_is_solved(seed: int) -> None:
    *_, report = train(Settings(), seed)
    assert report.solved


def test_the_memory_table_shows_one_frame_per_stacked_transition() -> None:
    small = replay.SHAPE._replace(capacity=400, obs=(12, 10, 4))
    lines = {line.name: line for line in replay.measure(small)}
    whole, stacked = lines["relive"].bytes_each, lines["relive (Stacked)"].bytes_each
    assert whole is not None
    assert stacked is not None
    frame = int(np.prod(small.obs[:2]))
    assert frame < stacked < 1.25 * frame
    assert 4 * frame < whole < 1.1 * 4 * frame
    replay.show(Console(quiet=True), small)
