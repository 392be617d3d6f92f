"""The trainers of each original, one module for each; `patch` decides whose buffers they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Trainer"]


@dataclass(frozen=True)
class Trainer:
    """One training of an original."""

    name: str
    task: str
    """The environment and the length."""
    train: Callable[[int], float]
    """Given a seed, trains and returns how well: more is better."""
