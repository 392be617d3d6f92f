"""The trainers of each original, one module for each: the same training on its own buffers and on ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["OURS", "Trainer", "replaced"]

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


@contextmanager
def replaced(prefix: str, *places: tuple[str, str, str]) -> Iterator[None]:
    """Names of the original's modules show our classes meanwhile: (module, name in it, module with our class)."""
    before = []
    for module, name, source in places if prefix else ():
        owner: Any = import_module(module)
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, getattr(import_module(f"{prefix}{source}"), name))
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
