"""What the README prints, runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import recollect as rc

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_examples_of_the_readme_run_as_printed() -> None:
    loop, replay, recurrent, actors = BLOCKS
    names: dict[str, Any] = {}
    exec(compile(loop, str(README), "exec"), names)
    assert names["rollout"].is_full
    assert len(names["rollout"].final_obs) == len(names["final_value"])
    assert sum(1 for line in loop.splitlines() if line and not line.startswith(("import", "#"))) <= 20
    exec(compile(replay, str(README), "exec"), names)
    assert len(names["replay"]) == 1_000
    assert [len(episode) for episode in names["replay"].episodes()] == [100] * 10
    exec(compile(recurrent, str(README), "exec"), names)
    assert names["steps"][0].shape[1:] == (16, 3)
    assert names["state"].shape[1:] == (32,)
    assert names["rollout"].stats.summary()["episodes"] == 24
    if hasattr(rc.kernels.native(), "ProcessLock"):
        exec(compile(actors, str(README), "exec"), names)
        assert names["batch"]["next_obs"].tolist() == [[1.0] * 3] * 32
