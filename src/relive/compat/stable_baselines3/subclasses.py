"""What users' subclasses of our buffers change: code that is written against Stable-Baselines3's arrays."""

from __future__ import annotations

from typing import Any


def overrides(buffer: Any, *names: str) -> bool:
    """Whether the class of a buffer is a user's and has its own method of one of these names."""
    kind = type(buffer)
    ours = next(base for base in kind.__mro__ if base.__module__.startswith("relive."))
    return any(getattr(kind, name) is not getattr(ours, name) for name in names)
