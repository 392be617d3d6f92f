"""The trainers of each original, one module per original; after `patch` they make our buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Trainer"]


@dataclass(frozen=True)
class Trainer:
    """One training of an original."""

    name: str
    task: str
    """Name of the environment and length of the training."""
    train: Callable[[int], float]
    """Function of a seed that trains and returns a score; higher is better."""
