"""`patch` puts our buffers into an original's modules, and `unpatch` takes them out as if nothing had been."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from relive.compat import patch, patching, unpatch
from relive.compat.apexrl import ReplayBuffer, RolloutBuffer

SOURCES = {
    "apexrl/__init__.py": "",
    "apexrl/buffer/__init__.py": "from apexrl.buffer.rollout_buffer import RolloutBuffer",
    "apexrl/buffer/rollout_buffer.py": "class RolloutBuffer:\n def add(self, step): pass\n def refine(self): pass",
    "apexrl/buffer/replay_buffer.py": "class ReplayBuffer:\n    def __init__(self, capacity, obs_shape): pass",
    "apexrl/algorithms/__init__.py": "",
    "apexrl/algorithms/ppo.py": """
from apexrl.buffer import rollout_buffer
from apexrl.buffer.rollout_buffer import RolloutBuffer, RolloutBuffer as Renamed
class Own(RolloutBuffer): pass
REGISTRY = {"rollout": RolloutBuffer}
def make(): return RolloutBuffer
def make_later():
    from apexrl.buffer import RolloutBuffer as Late
    return Late
def make_default(kind=RolloutBuffer): return kind
""",
    "apexrl/algorithms/dqn.py": "from apexrl.buffer.replay_buffer import ReplayBuffer",
}
pytestmark = pytest.mark.filterwarnings("ignore:patch\\('apexrl'\\)")


@pytest.fixture(autouse=True)
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small library of ApexRL's name, which is forgotten afterwards."""
    for path, source in SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    for name in [name for name in sys.modules if name.partition(".")[0] == "apexrl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    unpatch("apexrl")
    for name in [name for name in sys.modules if name.partition(".")[0] == "apexrl"]:
        del sys.modules[name]


def imported(name: str) -> Any:
    return importlib.import_module(name)


def names() -> dict[tuple[str, str], int]:
    """Every module-level name of the library, and the object that it is bound to."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "apexrl"]
    return {(module.__name__, name): id(value) for module in modules for name, value in vars(module).items()}


def test_loaded_modules_make_ours_and_then_exactly_what_they_made_before() -> None:
    ppo, _ = imported("apexrl.algorithms.ppo"), imported("apexrl.buffer.replay_buffer")
    before = names()
    patch("apexrl")
    assert (ppo.make(), ppo.make_later(), ppo.Renamed) == (RolloutBuffer,) * 3
    assert ppo.rollout_buffer.RolloutBuffer is imported("apexrl.buffer").RolloutBuffer is RolloutBuffer
    changed = {place for place, value in names().items() if before.get(place, value) != value}
    unpatch("apexrl")
    after = names()
    assert len(changed) == 5
    assert {place: after[place] for place in before} == before


def test_modules_that_are_loaded_while_it_lasts_make_ours_and_are_undone_too() -> None:
    with patch("apexrl"):
        dqn = imported("apexrl.algorithms.dqn")
        assert dqn.ReplayBuffer is ReplayBuffer
    assert dqn.ReplayBuffer is imported("apexrl.buffer.replay_buffer").ReplayBuffer is not ReplayBuffer


def test_what_it_does_not_reach() -> None:
    ppo = imported("apexrl.algorithms.ppo")
    bound_before, theirs = ppo.RolloutBuffer, ppo.Own.__base__
    with patch("apexrl"):
        assert [bound_before, ppo.make_default(), ppo.REGISTRY["rollout"], ppo.Own.__base__] == [theirs] * 4
        assert imported("apexrl.algorithms.ppo").RolloutBuffer is RolloutBuffer


def test_a_block_inside_another_ends_nothing_and_an_error_ends_it() -> None:
    ppo = imported("apexrl.algorithms.ppo")

    def fail() -> None:
        with patch("apexrl"):
            with patch("apexrl"):
                pass
            assert ppo.make() is RolloutBuffer
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ppo.make() is not RolloutBuffer
    unpatch("apexrl")  # a second time it does nothing
    assert ppo.make() is not RolloutBuffer


def test_what_somebody_else_bound_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = imported("apexrl.algorithms.ppo")
    monkeypatch.setattr(ppo, "Renamed", RolloutBuffer)
    mock = object()
    with patch("apexrl"):
        monkeypatch.setattr(ppo, "RolloutBuffer", mock)
    assert ppo.RolloutBuffer is mock
    assert ppo.Renamed is RolloutBuffer


def test_a_version_that_was_not_tested_gets_one_warning_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "version", lambda _: "9.1.2")
    with pytest.warns(UserWarning, match="apexrl") as told:
        patch("apexrl")
    (only,) = [str(each.message) for each in told]
    assert only == (
        "patch('apexrl'): expected apexrl 0.2, which was tested, got 9.1.2. These differ from ours: "
        "RolloutBuffer.add(step); RolloutBuffer.refine is missing."
    )
    unpatch("apexrl")
    monkeypatch.setattr(patching, "version", lambda _: "0.2.9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch("apexrl")


def test_an_unknown_or_absent_original_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="patch: expected one of agilerl, .*, got 'keras'"):
        patch("keras")
    monkeypatch.setitem(sys.modules, "apexrl", None)
    with pytest.raises(ImportError):
        patch("apexrl")


def test_a_stand_in_for_a_module_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apexrl.envs", object())
    with patch("apexrl"):
        assert imported("apexrl.algorithms.ppo").make() is RolloutBuffer


@pytest.mark.parametrize("command", [["program.py"], pytest.param(["-m", "program"], marks=pytest.mark.thorough)])
def test_a_program_runs_patched(command: list[str], tmp_path: Path) -> None:
    lines = "import sys, apexrl.algorithms.ppo\nprint(apexrl.algorithms.ppo.make().__module__, *sys.argv[1:], __name__)"
    (tmp_path / "program.py").write_text(lines)
    run = [sys.executable, "-W", "ignore", "-m", "relive.compat", "apexrl", *command, "--steps", "3"]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    told = subprocess.run(run, cwd=tmp_path, env=settings, capture_output=True, text=True, check=True).stdout
    assert told.split() == ["relive.compat.apexrl.buffer.rollout_buffer", "--steps", "3", "__main__"]


def test_a_command_without_a_program_is_told_how() -> None:
    main = imported("relive.compat.__main__").main
    for arguments in ([], ["apexrl"], ["keras", "script.py"], ["apexrl", "-m"]):
        with pytest.raises(SystemExit, match="usage: python -m relive.compat"):
            main(arguments)


INSTALLED = ["rsl_rl", "stable_baselines3", "sb3_contrib", "agilerl", "embodichain"]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_version_that_is_tested_here_has_the_arguments_of_ours(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    found = list(patching.replacements(name))
    assert found
    assert [told for each in found for told in patching.differences(*each)] == []


class TestStableBaselines3:
    @pytest.mark.parametrize("name", ["PPO", "A2C", "DQN", "SAC"])
    def test_its_algorithms_choose_ours(self, name: str, tmp_path: Path) -> None:
        sb3: Any = pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
        ours = imported("relive.compat.stable_baselines3")
        algorithm = getattr(sb3, name)
        off_policy: dict[str, Any] = {"learning_starts": 10, "buffer_size": 100}
        options = {"PPO": {"n_steps": 64}, "A2C": {}}.get(name, off_policy)
        with patch("stable_baselines3"):
            env = "Pendulum-v1" if name == "SAC" else "CartPole-v1"
            model = algorithm("MlpPolicy", env, device="cpu", policy_kwargs={"net_arch": [8]}, **options).learn(64)
            model.save(tmp_path / "model")
        kind = ours.RolloutBuffer if name in ("PPO", "A2C") else ours.ReplayBuffer
        buffer = model.rollout_buffer if name in ("PPO", "A2C") else model.replay_buffer
        assert type(buffer) is kind
        again = algorithm.load(tmp_path / "model")  # the file names our class
        assert type(again.rollout_buffer if name in ("PPO", "A2C") else again.replay_buffer) is kind

    def test_hindsight_is_ours_where_it_is_imported_afterwards(self) -> None:
        pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
        with patch("stable_baselines3"):
            found = imported("stable_baselines3").HerReplayBuffer
        assert found is imported("relive.compat.stable_baselines3").HerReplayBuffer

    def test_contrib_is_patched_with_it_and_both_are_undone_when_nobody_needs_them(self) -> None:
        contrib: Any = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
        ours = imported("relive.compat.sb3_contrib")
        chosen: ModuleType = imported("stable_baselines3.common.on_policy_algorithm")
        patch("stable_baselines3")
        patch("sb3_contrib")
        model = contrib.MaskablePPO("MlpPolicy", "CartPole-v1", n_steps=64, device="cpu")
        assert type(model.rollout_buffer) is imported(f"{ours.__name__}.common.maskable.buffers").MaskableRolloutBuffer
        unpatch("sb3_contrib")
        assert vars(chosen)["RolloutBuffer"].__module__.startswith("relive.compat")
        unpatch("stable_baselines3")
        theirs = vars(chosen)["RolloutBuffer"], vars(imported("sb3_contrib.ppo_mask.ppo_mask"))["MaskableRolloutBuffer"]
        assert [kind.__module__.partition(".")[0] for kind in theirs] == ["stable_baselines3", "sb3_contrib"]


def test_rsl_rl_makes_our_storage_and_pickles_name_ours() -> None:
    theirs: Any = pytest.importorskip("rsl_rl.algorithms.ppo", reason="rsl_rl is not installed")
    ours = imported("relive.compat.rsl_rl.storage").RolloutStorage
    with patch("rsl_rl"):
        assert theirs.RolloutStorage is ours
        assert imported("rsl_rl.storage").RolloutStorage is ours
    assert pickle.dumps(ours).count(b"relive.compat.rsl_rl") == 1
