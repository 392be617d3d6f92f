"""The examples run as printed, are short enough to read, and do the same for the same seed."""

import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from tests.tiers import select

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_one_short_file(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("autoreset", select("SAME_STEP", of=["NEXT_STEP", "SAME_STEP"]))
@pytest.mark.parametrize(
    ("env_id", "steps"), select(("CartPole-v1", 1500), of=[("CartPole-v1", 1500), ("Pendulum-v1", 4000)])
)
def test_ppo_runs_for_a_few_steps_and_repeats_itself(env_id: str, steps: int, autoreset: str) -> None:
    ppo = load("ppo")
    episodes = ppo.train(env_id, 1, steps, autoreset)
    assert episodes
    assert episodes == ppo.train(env_id, 1, steps, autoreset)
    assert [step for step, _ in episodes] == sorted(step for step, _ in episodes)


@pytest.mark.long
@pytest.mark.parametrize("autoreset", ["NEXT_STEP", "SAME_STEP"])
def test_ppo_learns_pendulum(autoreset: str) -> None:
    returns = [return_ for _, return_ in load("ppo").train("Pendulum-v1", 1, 100_000, autoreset)]
    assert sum(returns[:20]) / 20 < -900
    assert sum(returns[-50:]) / 50 > -300


@pytest.mark.thorough
def test_ppo_as_a_command_saves_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
    picture = tmp_path / "curves" / "cartpole.png"
    command = [sys.executable, "-W", "error", str(EXAMPLES / "ppo.py"), "--total-steps", "1000", "--plot", str(picture)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "mean return of the last" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ppo_refuses_observations_that_are_not_vectors() -> None:
    ppo = load("ppo")
    spaces = ppo.gym.spaces
    with pytest.raises(TypeError, match="expected a Box, got Discrete"):
        ppo.Agent(spaces.Discrete(3), spaces.Discrete(2))


def test_ppo_with_dict_observations_runs_for_a_few_steps_and_repeats_itself() -> None:
    example = load("ppo_dict_obs")
    returns = example.train(1, 3000)
    assert len(returns) > 10
    assert returns == example.train(1, 3000)


def test_every_room_can_be_solved_and_both_parts_of_the_observation_are_true() -> None:
    example = load("ppo_dict_obs")
    room = example.Room()
    for seed in range(20):
        obs, _ = room.reset(seed=seed)
        assert room.observation_space.contains(obs)
        assert obs["image"][0][tuple(room.place)] == 255
        assert not room.pillars[tuple(room.goal)]
        reached, frontier = {tuple(room.place)}, [room.place]
        while frontier:
            place = frontier.pop()
            for move in example.MOVES:
                there = tuple((place + move).clip(0, example.SIZE - 1))
                if there not in reached and not room.pillars[there]:
                    reached.add(there)
                    frontier.append(place + move)
        assert tuple(room.goal) in reached


@pytest.mark.parametrize("memory", select(False, of=[True, False]))
def test_recurrent_ppo_runs_for_a_few_steps_and_repeats_itself(memory: bool) -> None:
    example = load("recurrent_ppo")
    curve = example.train(1, 4500, memory=memory)
    assert len(curve) == 3
    assert curve == example.train(1, 4500, memory=memory)


@pytest.mark.long
def test_recurrent_ppo_solves_what_a_policy_without_memory_cannot() -> None:
    example = load("recurrent_ppo")
    assert max(mean for _, mean in example.train(1, 120_000, memory=True)) > 400
    assert max(mean for _, mean in example.train(1, 120_000, memory=False)) < 120


def test_distillation_runs_for_a_few_steps_and_repeats_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("distill")
    for name, value in {"ROUND_STEPS": 40, "STUDENT_EPOCHS": 2, "EPISODES": 5}.items():
        monkeypatch.setattr(example, name, value)
    returns = example.run(1, teacher_steps=1024, rounds=3)
    said = capsys.readouterr().out
    assert "student  round 2      960 rows" in said
    assert returns == example.run(1, teacher_steps=1024, rounds=3)
    assert said == capsys.readouterr().out


def test_the_student_sees_the_last_positions_and_no_velocities() -> None:
    example = load("distill")
    env = example.Positions()
    obs, _ = env.reset(seed=0)
    seen = [obs["state"][[0, 2]]] * example.NUM_FRAMES
    for action in (0, 1, 1, 0, 1, 1):
        assert env.observation_space.contains(obs)
        assert obs["seen"].tolist() == [frame.tolist() for frame in seen[-example.NUM_FRAMES :]]
        obs = env.step(action)[0]
        seen.append(obs["state"][[0, 2]])
    obs, _ = env.reset()
    assert (obs["seen"] == obs["state"][[0, 2]]).all()


@pytest.mark.long
def test_a_student_without_velocities_does_as_well_as_its_teacher() -> None:
    teacher, student = load("distill").run(1)
    assert teacher > 450
    assert student > 0.95 * teacher


def test_every_number_of_the_summary_is_read_back_from_the_event_file(tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed: pip install tensorboard",
    )
    summary = load("ppo_tensorboard").train(tmp_path, 1, 1500)
    assert summary["episodes"] > 20
    assert summary["tilted_rate"] + summary["far_rate"] + summary["truncated_rate"] == pytest.approx(1.0)
    log = events.EventAccumulator(str(tmp_path)).Reload()
    for name, number in summary.items():
        assert log.Scalars(f"episode/{name}")[-1].value == pytest.approx(number)
    steps = [event.step for event in log.Scalars("episode/return_mean")]
    assert len(steps) == 4
    assert steps == sorted(steps)
    assert steps[-1] >= 1500


def test_without_tensorboard_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit, match="pip install tensorboard"):
        load("ppo_tensorboard").train(tmp_path, 1, 100)
