"""`patch` binds the names of an original's buffers to ours, and `unpatch` restores them exactly."""

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
    """Install a small library named apexrl for one test."""
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


def load_module(name: str) -> Any:
    return importlib.import_module(name)


def module_level_names() -> dict[tuple[str, str], int]:
    """Return the id of the object of each module-level name of the library."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "apexrl"]
    return {(module.__name__, name): id(value) for module in modules for name, value in vars(module).items()}


def test_loaded_modules_make_our_buffers_until_unpatch_restores_their_names() -> None:
    ppo, _ = load_module("apexrl.algorithms.ppo"), load_module("apexrl.buffer.replay_buffer")
    before = module_level_names()
    patch("apexrl")
    assert (ppo.make(), ppo.make_later(), ppo.Renamed) == (RolloutBuffer,) * 3
    assert ppo.rollout_buffer.RolloutBuffer is load_module("apexrl.buffer").RolloutBuffer is RolloutBuffer
    changed = {place for place, value in module_level_names().items() if before.get(place, value) != value}
    unpatch("apexrl")
    after = module_level_names()
    assert len(changed) == 5
    assert {place: after[place] for place in before} == before


def test_modules_that_are_loaded_during_a_patch_make_our_buffers_until_it_ends() -> None:
    with patch("apexrl"):
        dqn = load_module("apexrl.algorithms.dqn")
        assert dqn.ReplayBuffer is ReplayBuffer
    assert dqn.ReplayBuffer is load_module("apexrl.buffer.replay_buffer").ReplayBuffer is not ReplayBuffer


def test_earlier_bindings_defaults_registries_and_subclasses_are_not_patched() -> None:
    ppo = load_module("apexrl.algorithms.ppo")
    bound_before, theirs = ppo.RolloutBuffer, ppo.Own.__base__
    with patch("apexrl"):
        assert [bound_before, ppo.make_default(), ppo.REGISTRY["rollout"], ppo.Own.__base__] == [theirs] * 4
        assert load_module("apexrl.algorithms.ppo").RolloutBuffer is RolloutBuffer


def test_only_the_outer_patch_block_ends_the_patch_also_after_an_error() -> None:
    ppo = load_module("apexrl.algorithms.ppo")

    def fail() -> None:
        with patch("apexrl"):
            with patch("apexrl"):
                pass
            assert ppo.make() is RolloutBuffer
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ppo.make() is not RolloutBuffer
    unpatch("apexrl")
    assert ppo.make() is not RolloutBuffer


def test_names_that_other_code_bound_are_kept_by_unpatch(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = load_module("apexrl.algorithms.ppo")
    monkeypatch.setattr(ppo, "Renamed", RolloutBuffer)
    mock = object()
    with patch("apexrl"):
        monkeypatch.setattr(ppo, "RolloutBuffer", mock)
    assert ppo.RolloutBuffer is mock
    assert ppo.Renamed is RolloutBuffer


def test_an_untested_version_gets_one_warning_that_lists_the_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "version", lambda _: "9.1.2")
    with pytest.warns(UserWarning, match="apexrl") as caught:
        patch("apexrl")
    (message,) = [str(warning.message) for warning in caught]
    assert message == (
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


def test_a_module_that_was_replaced_by_an_object_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apexrl.envs", object())
    with patch("apexrl"):
        assert load_module("apexrl.algorithms.ppo").make() is RolloutBuffer


@pytest.mark.parametrize("command", [["program.py"], pytest.param(["-m", "program"], marks=pytest.mark.thorough)])
def test_the_command_line_runs_a_program_with_our_buffers(command: list[str], tmp_path: Path) -> None:
    lines = "import sys, apexrl.algorithms.ppo\nprint(apexrl.algorithms.ppo.make().__module__, *sys.argv[1:], __name__)"
    (tmp_path / "program.py").write_text(lines)
    run = [sys.executable, "-W", "ignore", "-m", "relive.compat", "apexrl", *command, "--steps", "3"]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    output = subprocess.run(run, cwd=tmp_path, env=settings, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["relive.compat.apexrl.buffer.rollout_buffer", "--steps", "3", "__main__"]


def test_a_command_without_a_program_prints_the_usage() -> None:
    main = load_module("relive.compat.__main__").main
    for arguments in ([], ["apexrl"], ["keras", "script.py"], ["apexrl", "-m"]):
        with pytest.raises(SystemExit, match="usage: python -m relive.compat"):
            main(arguments)


INSTALLED = ["rsl_rl", "stable_baselines3", "sb3_contrib", "agilerl", "embodichain"]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_installed_version_has_the_arguments_of_our_classes(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    pairs = list(patching.find_replacements(name))
    assert pairs
    assert [difference for pair in pairs for difference in patching.find_differences(*pair)] == []


class TestStableBaselines3:
    @pytest.mark.parametrize("name", ["PPO", "A2C", "DQN", "SAC"])
    def test_patched_algorithms_of_stable_baselines3_make_our_buffers(self, name: str, tmp_path: Path) -> None:
        sb3: Any = pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
        ours = load_module("relive.compat.stable_baselines3")
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
        # The file names our class, which is loaded without a patch.
        again = algorithm.load(tmp_path / "model")
        assert type(again.rollout_buffer if name in ("PPO", "A2C") else again.replay_buffer) is kind

    def test_a_later_import_of_the_hindsight_buffer_gets_our_class(self) -> None:
        pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
        with patch("stable_baselines3"):
            kind = load_module("stable_baselines3").HerReplayBuffer
        assert kind is load_module("relive.compat.stable_baselines3").HerReplayBuffer

    def test_stable_baselines3_and_sb3_contrib_are_patched_together_until_both_are_unpatched(self) -> None:
        contrib: Any = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
        ours = load_module("relive.compat.sb3_contrib")
        chosen: ModuleType = load_module("stable_baselines3.common.on_policy_algorithm")
        patch("stable_baselines3")
        patch("sb3_contrib")
        model = contrib.MaskablePPO("MlpPolicy", "CartPole-v1", n_steps=64, device="cpu")
        assert (
            type(model.rollout_buffer) is load_module(f"{ours.__name__}.common.maskable.buffers").MaskableRolloutBuffer
        )
        unpatch("sb3_contrib")
        assert vars(chosen)["RolloutBuffer"].__module__.startswith("relive.compat")
        unpatch("stable_baselines3")
        theirs = (
            vars(chosen)["RolloutBuffer"],
            vars(load_module("sb3_contrib.ppo_mask.ppo_mask"))["MaskableRolloutBuffer"],
        )
        assert [kind.__module__.partition(".")[0] for kind in theirs] == ["stable_baselines3", "sb3_contrib"]


def test_patched_rsl_rl_makes_our_storage_whose_pickles_name_our_class() -> None:
    theirs: Any = pytest.importorskip("rsl_rl.algorithms.ppo", reason="rsl_rl is not installed")
    ours = load_module("relive.compat.rsl_rl.storage").RolloutStorage
    with patch("rsl_rl"):
        assert theirs.RolloutStorage is ours
        assert load_module("rsl_rl.storage").RolloutStorage is ours
    assert pickle.dumps(ours).count(b"relive.compat.rsl_rl") == 1
