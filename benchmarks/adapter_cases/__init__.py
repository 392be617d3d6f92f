"""Calls that training loops make, on an adapter and on the original that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One call: each factory makes a closure, warmed up, that performs it once."""

    name: str
    ours: Callable[[], Callable[[], Any]]
    theirs: Callable[[], Callable[[], Any]]
