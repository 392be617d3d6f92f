"""The sampler and the view that CONTRIBUTING shows are a sampler and a view."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import recollect as rc

PAGE = Path(__file__).parent.parent / "CONTRIBUTING.md"


def test_the_sampler_and_the_view_of_the_walk_through_work() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    replay = rc.ReplayBuffer(100, obs=1, action=(), sampler=names["Recent"](10), seed=0)
    for t in range(60):
        replay.add([float(t * t)], 0.0, float(t), False, False, [float((t + 1) ** 2)])
    batch = replay.sample(500, names["Delta"]())
    assert set(batch["reward"].tolist()) == set(range(50, 60))
    assert torch.equal(batch["delta"].squeeze(1), 2 * batch["reward"] + 1)
