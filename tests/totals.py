"""Lines in which tests report what they tried, printed whether they pass or not."""

from __future__ import annotations

import os

_told: list[str] = []

SEED = int(os.environ.get("RELIVE_SEED", "0"))
"""Seed of every trial that draws; a failure names it."""


def tell(line: str) -> None:
    """Report what a test has tried."""
    _told.append(line)


def take_lines() -> list[str]:
    """Return and forget the lines reported since the last call."""
    lines = _told.copy()
    _told.clear()
    return lines


def trials(name: str, usual: int) -> int:
    """How many: `RELIVE_<name>` in the environment sets it."""
    return int(os.environ.get(f"RELIVE_{name}", usual))
