"""The code of the Ray guide runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "ray.md"


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
def test_the_code_of_the_guide_runs() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
