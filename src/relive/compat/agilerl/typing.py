"""AgileRL's `typing`: how sequences are cut."""

from __future__ import annotations

from enum import Enum
from typing import Any

from relive.compat.agilerl.rows import original_or

__all__ = ["BPTTSequenceType"]


class BPTTSequenceType(Enum):
    """How episodes are cut into sequences of `max_seq_len` steps; what is left over at an episode's end is dropped."""

    CHUNKED = "chunked"
    """One after another."""
    MAXIMUM = "maximum"
    """From every step."""
    FIFTY_PERCENT_OVERLAP = "fifty_percent_overlap"
    """Each starts half a sequence after the one before."""
    FIFTY_PERCENT_OVERLAPPING = "fifty_percent_overlap"
    """The third kind as the documentation spells it."""


# One enumeration: AgileRL's own where it is installed, with the name that its documentation has for the third kind.
_only: Any = original_or("typing", BPTTSequenceType)
if not hasattr(_only, "FIFTY_PERCENT_OVERLAPPING"):
    _only.FIFTY_PERCENT_OVERLAPPING = _only.FIFTY_PERCENT_OVERLAP
BPTTSequenceType = _only
