"""AgileRL's `typing`: how sequences are cut; where AgileRL is installed, all of its names are its own."""

from __future__ import annotations

from typing import Any

from relive.compat.agilerl import sequences
from relive.compat.agilerl.original import original_or

__all__ = ["BPTTSequenceType"]

BPTTSequenceType: Any = original_or("typing", sequences.BPTTSequenceType)
