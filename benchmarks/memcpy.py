"""The physical limit: copying as many bytes as an operation must move, once and in one piece."""

from __future__ import annotations

import numpy as np

from .timing import Contestant

NAME = "memcpy of the same bytes"


def memcpy_of(nbytes: int, units: int = 1) -> Contestant:
    """A copy of so many bytes, from memory that is warm into memory that is: nobody who hands out copies is faster."""
    source = np.ones(max(nbytes, 1), np.uint8)
    target = np.zeros_like(source)
    return Contestant(NAME, "limit", lambda: np.copyto(target, source), units=units)
