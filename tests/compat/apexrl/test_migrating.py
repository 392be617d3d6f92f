"""The code blocks of the page on migrating from ApexRL run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[3] / "docs" / "migrating" / "apexrl.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_run_as_printed_and_both_loops_store_as_much() -> None:
    names: dict[str, Any] = {}
    imports, before, after, corrections = (compile(block, str(PAGE), "exec") for block in BLOCKS)
    for block in (imports, before):
        exec(block, names)
    assert names["data"]["advantages"].shape == (24 * 8,)
    exec(after, names)
    assert len(names["rollout"]) == len(names["buffer"]) == 24 * 8
    exec(corrections, names)
    assert names["replay"].action_dtype == torch.float32
    assert len(names["buffer"]) == 8
