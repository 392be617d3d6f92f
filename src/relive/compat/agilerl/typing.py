"""AgileRL's `typing`: how sequences are cut."""

from relive.compat.agilerl.sequences import BPTTSequenceType

__all__ = ["BPTTSequenceType"]
