"""The calls that a training loop makes, one module for each original: ours and theirs, set up alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """One call of an adapter, and the same call of the original."""

    name: str
    ours: Callable[[], Callable[[], Any]]
    """Makes a warmed-up closure that performs one call."""
    theirs: Callable[[], Callable[[], Any]]
    """The same on the original's class."""
