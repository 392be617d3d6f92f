"""Lines about the trials of a test, printed whether it passes or not; seeds and numbers of trials."""

from __future__ import annotations

import os

_lines: list[str] = []

SEED = int(os.environ.get("RELIVE_SEED", "0"))
"""Seed of all random trials; failures name it."""


def tell(line: str) -> None:
    """Report the trials of a test."""
    _lines.append(line)


def take_lines() -> list[str]:
    """Return and forget the lines reported since the last call."""
    lines = _lines.copy()
    _lines.clear()
    return lines


def trials(name: str, usual: int) -> int:
    """Return the number of trials: `RELIVE_<name>` in the environment, or `usual`."""
    return int(os.environ.get(f"RELIVE_{name}", usual))
