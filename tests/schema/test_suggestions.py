"""Names of other libraries get a suggestion of ours, and decorated classes keep their types for type checkers."""

from __future__ import annotations

import inspect
import json
import pydoc
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl
from relive.schema import suggestions


def replay(**options: Any) -> rl.ReplayBuffer:
    buffer = rl.ReplayBuffer(8, obs=2, action=1, seed=0, **options)
    buffer.add([0, 0], [0], 1.0, False, False, [1, 0])
    return buffer


def rollout() -> rl.RolloutBuffer:
    buffer = rl.RolloutBuffer(1, 2, obs=2, action=1)
    no = torch.zeros(2, dtype=torch.bool)
    buffer.add(torch.zeros(2, 2), torch.zeros(2, 1), torch.ones(2), no, no, value=torch.zeros(2))
    return buffer


KEYWORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "n_envs": (
        lambda: rl.ReplayBuffer(8, 2, 1, n_envs=2),  # pyright: ignore[reportCallIssue]
        "ReplayBuffer: expected the keyword num_envs, got n_envs=2. Write num_envs=2.",
    ),
    "buffer_size": (
        lambda: rl.ReplayBuffer(buffer_size=8, obs=2, action=1),  # pyright: ignore[reportCallIssue]
        "ReplayBuffer: expected the keyword capacity, got buffer_size=8. Write capacity=8.",
    ),
    "buffer_size of a rollout": (
        lambda: rl.RolloutBuffer(buffer_size=8, num_envs=1, obs=2, action=1),  # pyright: ignore[reportCallIssue]
        "RolloutBuffer: expected the keyword num_steps, got buffer_size=8. Write num_steps=8.",
    ),
    "observation_space": (
        lambda: rl.DistillationBuffer(8, observation_space=(2, 3)),  # pyright: ignore[reportCallIssue]
        "DistillationBuffer: expected the keyword obs, got observation_space=…. Write obs=….",
    ),
    "for_env": (
        lambda: rl.RolloutBuffer.for_env(None, n_steps=5),  # pyright: ignore[reportCallIssue]
        "for_env: expected the keyword num_steps, got n_steps=5. Write num_steps=5.",
    ),
    "prioritized": (
        lambda: rl.ReplayBuffer(8, 2, 1, prioritized=True),  # pyright: ignore[reportCallIssue]
        "got prioritized=True. Pass sampler=rl.Prioritized(alpha=…, beta=…).",
    ),
    "seq_len": (
        lambda: rl.Sequence(seq_len=8),  # pyright: ignore[reportCallIssue]
        "Sequence: expected the keyword length, got seq_len=8. Write length=8.",
    ),
    "n_step": (
        lambda: rl.NStep(n_step=3, gamma=0.9),  # pyright: ignore[reportCallIssue]
        "NStep: expected the keyword n, got n_step=3. Write n=3.",
    ),
    "a slip": (
        lambda: rl.EpisodeStats(num_env=2),  # pyright: ignore[reportCallIssue]
        "EpisodeStats: expected the keyword num_envs, got num_env=2. Write num_envs=2.",
    ),
    "no such thing": (
        lambda: rl.DistillationBuffer(4, 2, colour="red"),  # pyright: ignore[reportCallIssue]
        "DistillationBuffer: expected keywords among capacity, obs, action, extra, device, seed, got colour='red'. "
        "Leave it out.",
    ),
}


@pytest.mark.parametrize("word", KEYWORDS)
def test_a_keyword_of_another_library_is_answered_with_ours(word: str) -> None:
    call, answer = KEYWORDS[word]
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).endswith(answer)


def test_a_type_error_that_has_nothing_to_do_with_keywords_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'action'"):
        rl.ReplayBuffer(8, obs=2)  # pyright: ignore[reportCallIssue]


FIELDS = {
    "done": "Pass terminated and truncated: a time limit is not a failure.",
    "next_state": "Pass it as next_obs.",
    "rewards": "Pass it as reward.",
    "cost": "Declare it: extra={'cost': shape}.",
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_library_is_answered_with_ours(name: str) -> None:
    buffer = replay()
    with pytest.raises(rl.SchemaError) as caught:
        buffer.add([1, 0], [0], **{name: False})
    assert str(caught.value).endswith(f"got {name}. {FIELDS[name]}")
    assert len(buffer) == 1


METHODS: dict[str, tuple[Callable[[], Any], str]] = {
    "update_priorities": (replay, "Use ReplayBuffer.update_priority instead."),
    "push": (replay, "Use ReplayBuffer.add instead."),
    "size": (replay, "Use len(buffer) instead."),
    "compute_returns": (rollout, "Use RolloutBuffer.compute_advantage instead."),
    "feed_forward_generator": (rollout, "Use RolloutBuffer.minibatches instead."),
    "minibatches": (lambda: rl.DistillationBuffer(4, obs=2), "Use DistillationBuffer.epochs instead."),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_another_library_is_answered_with_ours(name: str) -> None:
    make, answer = METHODS[name]
    with pytest.raises(AttributeError) as caught:
        getattr(make(), name)
    assert str(caught.value).endswith(answer)
    assert caught.value.obj is None  # otherwise Python suggests the attribute with the most similar name
    assert not hasattr(make(), name)


def test_help_explains_the_methods_of_other_libraries() -> None:
    text = pydoc.plain(pydoc.render_doc(rl.ReplayBuffer))
    assert "push\n |      Not a part of relive: use ReplayBuffer.add." in text


def test_an_attribute_that_nobody_has_is_missing_as_usual() -> None:
    with pytest.raises(AttributeError, match="'ReplayBuffer' object has no attribute 'colour'"):
        replay().colour  # noqa: B018 # pyright: ignore


def test_no_word_of_another_library_hides_a_name_of_ours() -> None:
    for owner, names in suggestions._METHOD_NAMES.items():
        cls = getattr(rl, owner)
        for ours, words in names.items():
            assert ours == "len" or hasattr(cls, ours), (owner, ours)
            assert not [word for word in words if hasattr(cls, word)], owner
    known = {name for cls in (rl.ReplayBuffer, rl.RolloutBuffer) for name in inspect.signature(cls).parameters}
    assert known >= {"num_envs", "capacity", "num_steps", "obs", "action", "reward", "value", "autoreset", "seed"}


def test_wrapped_callables_keep_their_signatures() -> None:
    assert list(inspect.signature(rl.NStep).parameters) == ["n", "gamma"]
    assert "autoreset" in inspect.signature(rl.RolloutBuffer).parameters
    assert "autoreset" in inspect.signature(rl.RolloutBuffer.for_env).parameters
    assert list(inspect.signature(rl.gae).parameters)[:3] == ["reward", "value", "next_value"]


def test_load_says_when_another_kind_is_there(tmp_path: Path) -> None:
    replay().save(tmp_path / "replay")
    assert isinstance(rl.load(tmp_path / "replay", rl.ReplayBuffer), rl.ReplayBuffer)
    with pytest.raises(rl.IncompatibleCheckpoint, match="expected a RolloutBuffer, got a ReplayBuffer"):
        rl.load(tmp_path / "replay", rl.RolloutBuffer)


SCRIPT = """
import gymnasium as gym
import relive as rl

env = gym.make_vec("CartPole-v1", num_envs=2)
rollout = rl.RolloutBuffer.for_env(env, 16, seed=0)
replay = rl.ReplayBuffer.for_env(env, 16, sampler=rl.Prioritized(), seed=0)
reveal_type(rollout)
reveal_type(rl.load("runs"))
reveal_type(rl.load("runs", rl.ReplayBuffer))
rl.load("runs", kind=rl.ReplayBuffer).sample(32, rl.NStep(3, gamma=0.99))
rl.ReplayBuffer.for_env(env, 16, n_envs=2)
replay.update_priorities
rl.RolloutBuffer.for_env(env, 16, seed="zero")
"""


@pytest.mark.thorough
@pytest.mark.skipif(
    shutil.which("pyright", path=Path(sys.executable).parent) is None, reason="pyright is a tool of dev"
)
def test_pyright_knows_what_a_users_script_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(script)]
    told = json.loads(subprocess.run(command, capture_output=True, check=False, cwd=tmp_path).stdout)
    lines = SCRIPT.splitlines()
    said = {lines[each["range"]["start"]["line"]]: each for each in told["generalDiagnostics"]}
    revealed = [each["message"] for each in said.values() if each["severity"] == "information"]
    assert revealed == [
        'Type of "rollout" is "RolloutBuffer"',
        'Type of "rl.load("runs")" is "ReplayBuffer | RolloutBuffer | DistillationBuffer"',
        'Type of "rl.load("runs", rl.ReplayBuffer)" is "ReplayBuffer"',
    ]
    assert [line for line, each in said.items() if each["severity"] == "error"] == lines[-3:]
