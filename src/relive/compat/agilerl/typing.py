"""The enumeration of AgileRL's module `typing`."""

from __future__ import annotations

from enum import Enum
from typing import Any

from relive.compat.agilerl.rows import find_original_class

__all__ = ["BPTTSequenceType"]


class BPTTSequenceType(Enum):
    """Ways to cut an episode into sequences of `max_seq_len` steps; a shorter remainder at its end is dropped."""

    CHUNKED = "chunked"
    """Each sequence starts where the previous one ends."""
    MAXIMUM = "maximum"
    """A sequence starts at every step."""
    FIFTY_PERCENT_OVERLAP = "fifty_percent_overlap"
    """Each sequence starts half a sequence after the previous one."""
    FIFTY_PERCENT_OVERLAPPING = "fifty_percent_overlap"
    """FIFTY_PERCENT_OVERLAP, as AgileRL's documentation spells it."""


# Where AgileRL is installed, this name is AgileRL's own enumeration, which gets the documented spelling as an alias.
_sequence_type: Any = find_original_class("typing", "BPTTSequenceType", BPTTSequenceType)
if not hasattr(_sequence_type, "FIFTY_PERCENT_OVERLAPPING"):
    _sequence_type.FIFTY_PERCENT_OVERLAPPING = _sequence_type.FIFTY_PERCENT_OVERLAP
BPTTSequenceType = _sequence_type
