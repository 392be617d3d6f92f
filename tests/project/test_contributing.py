"""The extensions that CONTRIBUTING links to work, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl
from tests.conftest import BACKENDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names that the code of the page defines, after its own assertions."""
    namespace: dict[str, Any] = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    return namespace


def filled(sampler: Any) -> rl.ReplayBuffer:
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


def test_the_sampler_goes_on_after_a_load_and_with_views_of_ours(names: dict[str, Any], tmp_path: Path) -> None:
    replay = filled(names["ByPolicyAge"](10))
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


def test_contributing_links_to_each_walk_through() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    assert re.findall(r"docs/extending\.md#([\w-]+)", text) == anchors
    assert len(anchors) == 5


@pytest.mark.parametrize("page", [CONTRIBUTING, ROOT / "docs" / "design.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", page.read_text(encoding="utf-8"))
    assert len(named) > 5
    roots = (ROOT, ROOT / "src" / "relive", ROOT / "csrc")
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []
