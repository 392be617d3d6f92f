"""The off-policy examples run as printed, repeat themselves for a seed, and hindsight does what it is there for."""

import runpy
import subprocess
import sys
from contextlib import nullcontext
from importlib import util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import relive as rl
from tests.tiers import select

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, **constants: float) -> ModuleType:
    """The example as a module, with some of its constants changed."""
    spec = util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for constant, value in constants.items():
        assert hasattr(module, constant)
        setattr(module, constant, value)
    return module


def command(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    """Run the example as a command would, in this process: importing torch takes longer than the example."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "steps", "learning_starts"), select(("sac", 450, 300), of=[("dqn", 1000, 200), ("sac", 450, 300)])
)
def test_an_example_repeats_itself_for_a_seed_and_not_for_another(name: str, steps: int, learning_starts: int) -> None:
    example = load(name, LEARNING_STARTS=learning_starts, BATCH_SIZE=16)
    episodes = example.train(1, steps)
    assert [step for step, _ in episodes] == sorted(step for step, _ in episodes)
    assert episodes == example.train(1, steps)
    assert episodes != example.train(2, steps)


@pytest.mark.parametrize(("name", "steps"), select(("dqn", 1100), of=[("dqn", 1100), ("sac", 520)]))
def test_an_example_as_a_command_saves_its_picture(
    name: str,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
    picture = tmp_path / "curves" / f"{name}.png"
    command(monkeypatch, name, "--total-steps", steps, "--plot", picture)
    assert "mean return of the last" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_fast_td3_runs_as_a_command_and_saves_its_picture(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
    picture = tmp_path / "darts.png"
    with rl.kernels.force("torch") if backend == "torch" else nullcontext():
        command(monkeypatch, "fast_td3", "--num-envs", 64, "--total-steps", 40, "--device", "cpu", "--plot", picture)
    assert "mean reward of a step" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_fast_td3_learns_and_repeats_itself_for_a_seed() -> None:
    example = load("fast_td3", BATCH_SIZE=512)
    first = example.train(1, 512, 400, torch.device("cpu"))
    assert first[0][1] < -1.5
    assert max(reward for _, reward in first[-5:]) > -0.7
    assert first[:2] == example.train(1, 512, 40, torch.device("cpu"))


def test_a_dart_ends_where_it_leaves_the_field_and_after_its_time() -> None:
    darts = load("fast_td3").Darts(3, torch.device("cpu"))
    darts.position[:], darts.velocity[:], darts.age[:] = torch.tensor([[1.9, 0.0], [0.0, 0.0], [0.0, 0.0]]), 0.0, 5
    darts.velocity[0, 0], darts.age[1] = 1.0, 99
    next_obs, reward, terminated, truncated = darts.step(torch.zeros(3, 2))
    assert (terminated.tolist(), truncated.tolist()) == ([True, False, False], [False, True, False])
    assert next_obs[0, 0].item() == pytest.approx(1.9 + 0.5 * 0.9)
    assert reward[0] < -10
    assert darts.age.tolist() == [0, 0, 6]
    assert torch.equal(darts.obs()[2], next_obs[2])
    assert not torch.equal(darts.obs()[:2], next_obs[:2])


@pytest.mark.thorough
def test_r2d2_turns_where_the_sign_said_only_with_a_memory() -> None:
    r2d2 = load("r2d2", COPY_EVERY=50)
    with_memory, without = (r2d2.train(1, 5_000, memory=memory) for memory in (True, False))
    assert with_memory == r2d2.train(1, 5_000, memory=True)
    assert np.mean([return_ for _, return_ in with_memory[-3:]]) > 0.7
    assert abs(np.mean([return_ for _, return_ in without[-3:]])) < 0.4


def test_a_corridor_shows_its_sign_once_and_pays_at_the_fork() -> None:
    env = load("r2d2").Corridor()
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        sign, seen, ended, reward = obs[0], [], False, 0.0
        assert sign in (-1, 1)
        while not ended:
            right = bool(obs[1]) and sign > 0
            obs, reward, ended, _, _ = env.step(np.int64(right))
            seen.append(obs.copy())
        assert reward == 1.0
        assert 5 <= len(seen) <= 11
        assert not any(part[0] for part in seen)
        assert [bool(part[1]) for part in seen] == [False] * (len(seen) - 2) + [True, False]


@pytest.mark.parametrize("arguments", [("--no-memory",), ("--plot", "corridor.png")])
def test_r2d2_runs_as_a_command(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
    monkeypatch.chdir(tmp_path)
    command(monkeypatch, "r2d2", "--total-steps", 1700, *arguments)
    said = capsys.readouterr().out
    assert "mean return of the last 100 episodes" in said
    assert ("with memory" in said) == ("--plot" in arguments)
    assert (tmp_path / "corridor.png").exists() == ("--plot" in arguments)


@pytest.mark.thorough
def test_hindsight_reaches_goals_that_plain_learning_does_not() -> None:
    her = load("her", NUM_ENVS=4, LEARNING_STARTS=200, BATCH_SIZE=64, LEARNING_RATE=3e-3)
    rate = {}
    for hindsight in (True, False):
        episodes = her.train(1, 3_000, hindsight=hindsight, num_bits=8)
        rate[hindsight] = np.mean([success for _, success in episodes[-100:]])
    assert rate[True] > 0.8
    assert rate[False] < 0.2


def test_the_rule_that_relabels_is_the_environments_own() -> None:
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


@pytest.mark.parametrize("arguments", [(), ("--without-hindsight",), ("--plot", "bits.png")])
def test_her_runs_as_a_command(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments and arguments[-1].endswith(".png"):
        pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
    monkeypatch.chdir(tmp_path)
    command(monkeypatch, "her", "--total-steps", 1100, "--num-bits", 4, *arguments)
    said = capsys.readouterr().out
    assert ("with hindsight" in said) == ("--without-hindsight" not in arguments)
    assert ("without hindsight" in said) == bool(arguments)
    assert (tmp_path / "bits.png").is_file() == ("--plot" in arguments)


def test_atari_frames_are_stored_once(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ale_py", reason="ale-py is not installed: pip install 'gymnasium[atari]'")
    pytest.importorskip("cv2", reason="OpenCV is not installed: pip install opencv-python-headless")
    measured = load("atari_dqn", BATCH_SIZE=4).train(
        "ALE/Breakout-v5", seed=1, total_steps=220, capacity=100, learning_starts=200
    )
    assert measured["lives"] > 2
    # 100 rows, the spare one, and the three frames that the oldest stack reaches back.
    assert measured["bytes_per_transition"] < 1.04 * 7_120
    assert measured["sample_ms"] > 0
    assert "bytes each" in capsys.readouterr().out


def test_without_ale_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(SystemExit, match="pip install"):
        command(monkeypatch, "atari_dqn")


@pytest.mark.long
def test_dqn_learns_cartpole() -> None:
    assert np.mean([return_ for _, return_ in load("dqn").train(1, 50_000)[-20:]]) > 400


@pytest.mark.long
def test_sac_learns_pendulum() -> None:
    assert np.mean([return_ for _, return_ in load("sac").train(1, 10_000)[-10:]]) > -250


@pytest.mark.long
def test_her_flips_fifteen_bits() -> None:
    her = load("her")
    assert np.mean([success for _, success in her.train(1, 60_000, hindsight=True)[-200:]]) > 0.95
    assert np.mean([success for _, success in her.train(1, 60_000, hindsight=False)[-200:]]) < 0.05


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(rl.kernels.native(), "ProcessLock"), reason="needs Linux and a compiler")
def test_acting_and_learning_in_two_processes_runs_as_a_command(tmp_path: Path) -> None:
    picture = tmp_path / "async_sac.png"
    command = [sys.executable, str(EXAMPLES / "async_sac.py"), "--total-steps", "700", "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "mean return of the last 3 of 3 episodes" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_latent_states_are_written_back_and_the_command_saves_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib to draw")
    command(monkeypatch, "latent_replay", "--updates", 100, "--plot", tmp_path / "latent.png")
    said = capsys.readouterr().out
    assert said.count("100 updates   error of the foreseen speed") == 2
    assert (tmp_path / "latent.png").read_bytes().startswith(b"\x89PNG")
    example = load("latent_replay", EVALUATE_EVERY=20)
    assert example.train(1, 40, writes_back=True) == example.train(1, 40, writes_back=True)


@pytest.mark.thorough
def test_a_model_remembers_more_from_states_that_were_written_back() -> None:
    example = load("latent_replay", EVALUATE_EVERY=500)
    written_back, zeros = (example.train(1, 2_000, writes_back=writes_back)[-1][1] for writes_back in (True, False))
    assert written_back < 0.75 * zeros
