"""The extensions of docs/extending.md: a sampler, a view, an estimator and an adapter of a user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl
from tests.conftest import BACKENDS

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Run the code of the page, assertions included, and return the names that it defines."""
    namespace: dict[str, Any] = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    return namespace


def fill_buffer(sampler: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(100, obs=1, action=(), sampler=sampler, seed=0)
    for t in range(60):
        replay.add([float(t * t)], 0.0, float(t), False, False, [float((t + 1) ** 2)])
    return replay


def test_the_sampler_prefers_new_rows_and_the_view_adds_the_change(names: dict[str, Any]) -> None:
    replay: Any = rl.ReplayBuffer(100, obs=1, action=(), sampler=names["ByPolicyAge"](1.0), seed=0)
    for t in range(60):
        replay.sampler.version = t // 20
        replay.add([float(t * t)], 0.0, float(t), False, False, [float((t + 1) ** 2)])
    batch = replay.sample(4_000, names["Delta"]())
    shares = torch.bincount((batch["reward"] // 20).long()) / 4_000
    assert shares.tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.03)
    assert torch.equal(batch["delta"].squeeze(1), 2 * batch["reward"] + 1)


def test_a_loaded_sampler_continues_its_draws_with_every_view(names: dict[str, Any], tmp_path: Path) -> None:
    replay = fill_buffer(names["ByPolicyAge"](10))
    replay.save(tmp_path)
    again = rl.load(tmp_path, rl.ReplayBuffer, sampler=names["ByPolicyAge"](10))
    for view in (names["Delta"](), rl.NStep(3, 0.9), rl.Sequence(4)):
        assert torch.equal(again.sample(50, view)["index"], replay.sample(50, view)["index"])


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_the_estimator_follows_its_formula_on_every_backend(names: dict[str, Any], backend: str) -> None:
    # The first environment is disappointed at each next step and stops at its value, 5; the second never is.
    reward = torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 4.0]])
    value, next_value = torch.tensor([[0.0, 0], [5, 0], [5, 0]]), torch.tensor([[5.0, 0], [5, 0], [2, 8]])
    no = torch.zeros(3, 2, dtype=torch.bool)
    result = names["upgoing_return"](reward, value, next_value, no, no, gamma=0.5)
    assert result[:, 0].tolist() == [1 + 0.5 * 5, 2 + 0.5 * 5, 0 + 0.5 * 2]
    assert result[:, 1].tolist() == [1 + 0.5 * 6, 2 + 0.5 * 8, 4 + 0.5 * 8]


def test_the_adapter_can_be_inspected(names: dict[str, Any]) -> None:
    assert rl.inspect(names["memory"]).as_dict()["episodes"]["ends"]["terminated"] == 5
