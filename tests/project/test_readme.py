"""The code of the README runs, and its figures equal the saved results."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from benchmarks.training import held_bytes

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGE = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


REASON, TRAINING = BLOCKS


def run(block: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a block of code, with `names` as its variables, and return the variables."""
    names = {} if names is None else names
    exec(compile(block, str(README), "exec", dont_inherit=True), names)
    return names


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Run the first training loop and return its variables."""
    return run(TRAINING)


def test_the_first_loop_learns(trained: dict[str, Any]) -> None:
    returns = trained["stats"].episodes()["return"]
    assert len(returns) > 100
    first, last = returns[:50].mean(), returns[-50:].mean()
    assert last > 4 * first, f"mean return of the first 50 episodes {first:.0f}, of the last 50 {last:.0f}"


def test_the_first_page_of_the_docs_continues_the_same_loop(trained: dict[str, Any]) -> None:
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text("utf-8"), re.DOTALL)
    assert first == TRAINING
    assert len(run(second, trained)["replay"]) == 200


def test_the_first_block_counts_the_transitions_that_happened() -> None:
    replay = run(REASON)["replay"]
    assert f"print(len(replay))  # {len(replay)}\n" in REASON
    assert f"holds 8,000 transitions, and {8_000 - len(replay)} of them" in PAGE


def test_the_first_block_omits_exactly_the_dummy_steps() -> None:
    env = gym.make_vec("CartPole-v1", num_envs=8)
    env.action_space.seed(0)
    env.reset(seed=0)
    ended, dummies = np.zeros(8, bool), 0
    for _ in range(1_000):
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        assert not reward[ended].any()
        dummies += int(ended.sum())
        ended = terminated | truncated
    assert f"{dummies} of them never happened" in PAGE


@pytest.fixture(scope="module")
def trained_by_sb3() -> dict[str, Any]:
    """Return the trained models before ("-") and after ("+") the one-line change."""
    pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    lines = {side: [line[1:] for line in block.splitlines() if line[:1] in (" ", side)] for side in "-+"}
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # warnings of the dependencies of Stable-Baselines3
        return {side: run("\n".join(code))["model"] for side, code in lines.items()}


@pytest.mark.parametrize(("side", "owner"), [("-", "stable_baselines3"), ("+", "relive.compat.stable_baselines3")])
def test_both_sides_of_the_one_line_change_train(trained_by_sb3: dict[str, Any], side: str, owner: str) -> None:
    buffer = trained_by_sb3[side].replay_buffer
    assert type(buffer).__module__.startswith(owner)
    assert buffer.size() > 200


def test_the_tables_equal_the_saved_results() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "front_page.py"))["written"]
    assert written(PAGE) == PAGE, "run python docs/front_page.py"


def test_the_table_has_the_bytes_of_both_buffers_of_the_one_line_change(trained_by_sb3: dict[str, Any]) -> None:
    theirs, ours = (f"{held_bytes(trained_by_sb3[side].replay_buffer):,}" for side in "-+")
    page = (ROOT / "docs" / "migrating" / "stable_baselines3.md").read_text(encoding="utf-8")
    assert f"| 50,000 transitions of CartPole | {theirs} | {ours} |" in page


def test_every_file_linked_from_the_readme_exists() -> None:
    linked = re.findall(r'\]\(([^)#:]+)\)|src="([^":]+)"', PAGE)
    assert len(linked) > 20
    for path in (first or second for first, second in linked):
        assert (ROOT / path.partition("#")[0]).exists(), path
