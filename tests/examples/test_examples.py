"""The examples run as commands, are reproducible for a seed, and learn."""

import os
import runpy
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.tiers import select

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, **constants: float) -> ModuleType:
    """Load an example as a module and change some of its constants."""
    spec = util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    for constant, value in constants.items():
        assert hasattr(module, constant)
        setattr(module, constant, value)
    return module


COMMANDS = [
    ("action_chunks --updates 10", "single actions: "),
    ("dqn --total-steps 1100 --plot curve.png", "mean return of the last"),
    ("fast_td3 --num-envs 64 --total-steps 40 --device cpu --plot curve.png", "mean reward of a step"),
    ("grpo --rollouts 10 --kl 0.1", "mean return of the last"),
    ("her --total-steps 1100 --num-bits 4 --plot curve.png", "without hindsight"),
    ("her --total-steps 1100 --num-bits 4 --without-hindsight", "without hindsight"),
    ("latent_replay --updates 100 --plot curve.png", "error of the predicted speed"),
    ("multi_agent --total-steps 1000", "mean return of the last"),
    ("ppo --total-steps 1000 --plot curve.png", "mean return of the last"),
    ("ppo_dict_obs --total-steps 1000", "mean return of the last"),
    ("r2d2 --total-steps 1700 --no-memory", "mean return of the last 100 episodes"),
    ("r2d2 --total-steps 1700 --plot curve.png", "with memory"),
    ("recurrent_ppo --total-steps 4500", "memory"),
    ("sac --total-steps 520 --plot curve.png", "mean return of the last"),
]
SLOW = ("--without-hindsight", "--no-memory", "recurrent_ppo", "sac")


@pytest.mark.parametrize(
    ("line", "output"), select(*(case for case in COMMANDS if not any(slow in case[0] for slow in SLOW)), of=COMMANDS)
)
def test_an_example_runs_as_a_command(
    line: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example runs in this process: importing torch again would take longer."""
    if "--plot" in line:
        pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
    name, *arguments = line.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert output in capsys.readouterr().out
    assert (tmp_path / "curve.png").exists() == ("--plot" in line)


REPEATED: list[tuple[str, dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
    ("action_chunks", {"COURSES": 50}, (20,), {}),
    ("dqn", {"LEARNING_STARTS": 200, "BATCH_SIZE": 16}, (1000,), {}),
    ("fast_td3", {"BATCH_SIZE": 512}, (512, 40, torch.device("cpu")), {}),
    ("grpo", {}, (3,), {}),
    ("latent_replay", {"EVALUATE_EVERY": 20}, (40,), {"writes_back": True}),
    ("multi_agent", {}, (2048,), {}),
    ("ppo_dict_obs", {}, (3000,), {}),
    ("recurrent_ppo", {}, (4500,), {"memory": True}),
    ("recurrent_ppo", {}, (4500,), {"memory": False}),
    ("sac", {"LEARNING_STARTS": 300, "BATCH_SIZE": 16}, (450,), {}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "constants", "arguments", "options"), REPEATED)
def test_an_example_repeats_itself_for_a_seed_and_not_for_another(
    name: str, constants: dict[str, float], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    example = load(name, **constants)
    first, again, other = (example.train(seed, *arguments, **options) for seed in (1, 1, 2))
    assert first
    assert first == again != other


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


def test_recurrent_ppo_runs_for_a_few_steps() -> None:
    assert load("recurrent_ppo").train(1, 1500, memory=True)


def test_distillation_runs_for_a_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    load("distill", ROUND_STEPS=40, STUDENT_EPOCHS=2, EPISODES=5).run(1, teacher_steps=1024, rounds=3)
    assert "student  round 2      960 rows" in capsys.readouterr().out


def test_every_number_of_the_summary_is_read_back_from_the_event_file(tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed: pip install tensorboard",
    )
    summary = load("ppo_tensorboard").train(tmp_path, 1, 1500)
    log = events.EventAccumulator(str(tmp_path)).Reload()
    for name, number in summary.items():
        assert log.Scalars(f"episode/{name}")[-1].value == pytest.approx(number)


def test_hindsight_uses_the_rule_of_the_environment() -> None:
    her = load("her")
    env = her.FlipBits(3)
    replay = rl.ReplayBuffer.for_env(env, 300, seed=0)
    rng = np.random.default_rng(0)
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        for _ in range(10):
            action = rng.integers(3)
            step = env.step(action)
            replay.add_step(obs, action, step)
            obs = step[0]
            if step[2]:
                break
        replay.cut()
    true = replay.sample(500)
    assert true["terminated"].any()
    view = rl.Hindsight("desired_goal", "achieved_goal", her.judge, ratio=1.0)
    for batch in (true, replay.sample(500, view)):
        reward, terminated = her.judge(batch["next_obs", "achieved_goal"], batch["obs", "desired_goal"], batch)
        assert torch.equal(batch["reward"], reward)
        assert torch.equal(batch["terminated"], terminated)
        assert torch.equal(batch["obs", "desired_goal"], batch["next_obs", "desired_goal"])


def test_atari_frames_are_stored_once() -> None:
    pytest.importorskip("ale_py", reason="ale-py is not installed: pip install 'gymnasium[atari]'")
    pytest.importorskip("cv2", reason="OpenCV is not installed: pip install opencv-python-headless")
    measured = load("atari_dqn", BATCH_SIZE=4).train(
        "ALE/Breakout-v5", seed=1, total_steps=220, capacity=100, learning_starts=200
    )
    # 100 rows, one spare row, and three older frames for the oldest stack.
    assert measured["bytes_per_transition"] < 1.04 * 7_120


def run_in_new_process(script: str, *arguments: object, **environment: str) -> str:
    """Run an example in a new process and return its output."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    settings = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500, env=settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="needs Linux and a compiler")
def test_async_sac_runs_in_two_processes(tmp_path: Path) -> None:
    picture = tmp_path / "async_sac.png"
    output = run_in_new_process("async_sac.py", "--total-steps", 700, "--plot", picture)
    assert "mean return of the last 3 of 3 episodes" in output
    assert picture.exists()


@pytest.mark.thorough
def test_apex_dqn_runs_on_ray(cluster: str, tmp_path: Path) -> None:
    options = ("--total-steps", 1400, "--actors", 2, "--shards", 2, "--checkpoint", tmp_path / "memory")
    assert (
        "mean return of the last"
        in run_in_new_process("apex_dqn_ray.py", *options, RAY_ADDRESS=cluster).splitlines()[-1]
    )


# Learning results


def mean_of_last(curve: list[tuple[int, float]], count: int) -> float:
    return float(np.mean([value for _, value in curve[-count:]]))


@pytest.mark.thorough
def test_fast_td3_learns() -> None:
    curve = load("fast_td3", BATCH_SIZE=512).train(1, 512, 400, torch.device("cpu"))
    assert curve[0][1] < -1.5
    assert max(reward for _, reward in curve[-5:]) > -0.7


@pytest.mark.thorough
def test_r2d2_turns_where_the_sign_said_only_with_a_memory() -> None:
    r2d2 = load("r2d2", COPY_EVERY=50)
    assert mean_of_last(r2d2.train(1, 5_000, memory=True), 3) > 0.7
    assert abs(mean_of_last(r2d2.train(1, 5_000, memory=False), 3)) < 0.4


@pytest.mark.thorough
def test_hindsight_reaches_goals_that_plain_learning_does_not() -> None:
    her = load("her", NUM_ENVS=4, LEARNING_STARTS=200, BATCH_SIZE=64, LEARNING_RATE=3e-3)
    assert mean_of_last(her.train(1, 3_000, hindsight=True, num_bits=8), 100) > 0.8
    assert mean_of_last(her.train(1, 3_000, hindsight=False, num_bits=8), 100) < 0.2


@pytest.mark.thorough
def test_a_model_remembers_more_from_states_that_were_written_back() -> None:
    example = load("latent_replay", EVALUATE_EVERY=500)
    written_back, zeros = (example.train(1, 2_000, writes_back=writes_back)[-1][1] for writes_back in (True, False))
    assert written_back < 0.75 * zeros


@pytest.mark.long
@pytest.mark.parametrize("autoreset", ["NEXT_STEP", "SAME_STEP"])
def test_ppo_learns_pendulum(autoreset: str) -> None:
    curve = load("ppo").train("Pendulum-v1", 1, 100_000, autoreset)
    assert mean_of_last(curve[:20], 20) < -900
    assert mean_of_last(curve, 50) > -300


@pytest.mark.long
def test_recurrent_ppo_solves_what_a_policy_without_memory_cannot() -> None:
    example = load("recurrent_ppo")
    assert max(mean for _, mean in example.train(1, 120_000, memory=True)) > 400
    assert max(mean for _, mean in example.train(1, 120_000, memory=False)) < 120


@pytest.mark.long
def test_a_student_without_velocities_does_as_well_as_its_teacher() -> None:
    teacher, student = load("distill").run(1)
    assert teacher > 450
    assert student > 0.95 * teacher


@pytest.mark.long
def test_chunks_pass_the_pillars_that_single_actions_hit() -> None:
    train = load("action_chunks").train
    assert train(1, 3000, 12)[-1] > 0.9
    assert train(1, 3000, 1)[-1] < 0.7


@pytest.mark.long
def test_grpo_learns_without_a_critic_and_a_kl_penalty_slows_it() -> None:
    example = load("grpo")
    returns, held = example.train(1, 100), example.train(1, 25, kl=10.0)
    assert returns[0] == held[0] < -40
    assert np.mean(returns[-10:]) > example.SOLVED
    assert abs(np.mean(held[-5:]) - np.mean(held[:5])) < 10


@pytest.mark.long
def test_several_agents_learn_together() -> None:
    example = load("multi_agent")
    returns = example.train(1, example.TOTAL_STEPS)
    assert np.mean(returns[:50]) < -3
    assert np.mean(returns[-100:]) > example.SOLVED


@pytest.mark.long
def test_dqn_learns_cartpole() -> None:
    assert mean_of_last(load("dqn").train(1, 50_000), 20) > 400


@pytest.mark.long
def test_sac_learns_pendulum() -> None:
    assert mean_of_last(load("sac").train(1, 10_000), 10) > -250


@pytest.mark.long
def test_her_flips_fifteen_bits() -> None:
    her = load("her")
    assert mean_of_last(her.train(1, 60_000, hindsight=True), 200) > 0.95
    assert mean_of_last(her.train(1, 60_000, hindsight=False), 200) < 0.05


@pytest.mark.long
def test_apex_dqn_learns_on_ray(cluster: str) -> None:
    assert float(run_in_new_process("apex_dqn_ray.py", "--seed", 1, RAY_ADDRESS=cluster).split()[-1]) > 300
