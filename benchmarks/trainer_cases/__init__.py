"""The trainers of each original, one module for each: the same training on its own buffers and on ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["OURS", "Trainer"]

OURS = "relive.compat."
"""What stands before an original's module where its class is ours."""


@dataclass(frozen=True)
class Trainer:
    """One training of an original."""

    name: str
    task: str
    """The environment and the length."""
    train: Callable[[str, int], float]
    """Given the prefix of the imports ("" or `OURS`) and a seed, trains and returns how well: more is better."""
