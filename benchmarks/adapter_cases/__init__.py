"""The calls of a training loop, one module per original, on our class and on the original's with the same set-up."""

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
    """Returns a function that makes one call on our class, after a warm-up."""
    theirs: Callable[[], Callable[[], Any]]
    """Returns the same for the original's class."""
