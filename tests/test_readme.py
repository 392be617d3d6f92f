"""What the README prints, runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_loop_of_the_readme_runs_as_printed() -> None:
    (loop,) = BLOCKS
    names: dict[str, Any] = {}
    exec(compile(loop, str(README), "exec"), names)
    assert names["rollout"].is_full
    assert len(names["rollout"].final_obs) == len(names["final_value"])
    assert sum(1 for line in loop.splitlines() if line and not line.startswith(("import", "#"))) <= 20
