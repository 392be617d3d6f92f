"""examples/resume.py: a killed training continues from its last pair of checkpoints, and invents no transition."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import relive as rl
from tests.examples.test_examples import EXAMPLES, load

STEP = 0.02  # seconds per step of CartPole


def check_transitions(replay: rl.ReplayBuffer) -> None:
    """Assert that every next observation follows CartPole's equation: no row joins two episodes."""
    rows = replay[replay.ids()]
    torch.testing.assert_close(rows["next_obs"][:, 0], rows["obs"][:, 0] + STEP * rows["obs"][:, 1])
    replay.check()


def kill_after(folder: Path, saves: int) -> None:
    """Run the example in a separate process, and kill it after `saves` saves."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / "resume.py"), str(folder), "--save-every", "300"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            saves -= line.startswith("saved")
            if saves == 0:
                process.kill()
                break
    assert process.returncode != 0


def test_a_killed_training_continues(tmp_path: Path) -> None:
    resume = load("resume")
    kill_after(tmp_path, 3)
    _, newest = resume.learners(tmp_path)[-1]
    reached, _ = torch.load(newest, weights_only=True)["counts"]
    assert reached >= 900

    training = resume.train(tmp_path, reached + 200, save_every=100)
    assert training.num_steps == reached + 200
    assert training.replay.stats.num_steps <= training.num_steps
    assert len(training.replay) > reached // 2
    updates = [int(state["step"]) for state in training.optimizer.state.values()]
    assert set(updates) == {training.num_updates}, "the optimizer counts every update once"
    check_transitions(training.replay)


def test_a_kill_between_buffer_and_learner_leaves_the_previous_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume = load("resume")
    resume.train(tmp_path, 400, save_every=200)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", raise_interrupted)
        with pytest.raises(InterruptedError):
            resume.train(tmp_path, 600, save_every=200)
    (_, older), (number, _) = resume.learners(tmp_path)
    assert rl.load(tmp_path / "replay", number=number + 1), "the buffer was saved, the learner was not"

    with pytest.warns(UserWarning, match="checkpoints of another buffer"):
        training = resume.train(tmp_path, 800, save_every=200)
    assert training.num_steps == 800
    assert not older.exists()
    check_transitions(training.replay)


def raise_interrupted(*_: object) -> None:
    raise InterruptedError


def test_resumed_draws_equal_the_uninterrupted_draws(tmp_path: Path) -> None:
    resume = load("resume")
    training = resume.train(tmp_path, 1200, save_every=600)
    again = resume.train(tmp_path, 1200, save_every=600)
    assert (again.replay.sample(64) == training.replay.sample(64)).all()


@pytest.mark.parametrize(("cut", "rows", "returns"), [(True, 6, [5, 2, 2]), (False, 5, [5, 1, 7])])
def test_cut_after_a_load_forgets_the_dummy_step_and_the_open_episode(
    cut: bool, rows: int, returns: list[float], tmp_path: Path
) -> None:
    """Resume a buffer saved right after an end, with `cut()` and without (docs/guides/resuming.md)."""
    stats, obs, never = rl.EpisodeStats(2), torch.zeros(2, 1), [False, False]
    replay = rl.ReplayBuffer(100, obs=1, action=(), num_envs=2, autoreset="NEXT_STEP", stats=stats)
    replay.add(obs, [0, 0], [5.0, 5.0], [True, False], never, obs + 1)
    replay.save(tmp_path)

    resumed = rl.load(tmp_path, rl.ReplayBuffer)
    if cut:
        resumed.cut()
    resumed.add(obs + 7, [0, 0], [1.0, 1.0], never, never, obs + 8)
    resumed.add(obs + 8, [0, 0], [1.0, 1.0], [True, True], never, obs + 9)
    assert len(resumed) == rows
    assert resumed.stats is not None
    assert resumed.stats.episodes()["return"].tolist() == returns
