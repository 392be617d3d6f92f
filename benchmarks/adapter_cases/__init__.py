"""The calls of training loops, one module per original; each call has the same set-up on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """One call of an adapter's class, and the same call of the original's class."""

    name: str
    ours: Callable[[], Callable[[], Any]]
    """Returns a function that makes one call on our class, after a warm-up."""
    theirs: Callable[[], Callable[[], Any]]
    """Returns the same for the original's class."""
