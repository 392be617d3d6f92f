"""What was tried: lines that tests tell, and that are printed whether they pass or not."""

from __future__ import annotations

import os

_told: list[str] = []

SEED = int(os.environ.get("RELIVE_SEED", "0"))
"""Of every trial that draws; a failure names it."""


def tell(line: str) -> None:
    """Say what a test has tried."""
    _told.append(line)


def taken() -> list[str]:
    """What was told since the last time."""
    lines = _told.copy()
    _told.clear()
    return lines


def trials(name: str, usual: int) -> int:
    """How many: `RELIVE_<name>` in the environment sets it."""
    return int(os.environ.get(f"RELIVE_{name}", usual))
