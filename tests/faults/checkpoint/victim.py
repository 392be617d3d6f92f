"""What runs in a process that is killed."""

from __future__ import annotations

from pathlib import Path

from relive.checkpoint.saving import save
from tests.checkpoint.traffic import KINDS
from tests.faults.checkpoint.disk import change, gone_on, killed_at


def save_until(kind: str, root: Path, point: int) -> None:
    """Go on from the newest checkpoint, save, and be killed at an operation."""
    save(gone_on(kind, root), root, files=killed_at(point))


def save_first(kind: str, root: Path, point: int) -> None:
    """Save into an empty folder, and be killed at an operation."""
    buffer = KINDS[kind].make()
    for n in range(17):
        KINDS[kind].act(buffer, n)
    save(buffer, root, files=killed_at(point))


def save_for_ever(kind: str, root: Path, ready: Path) -> None:
    """Change and save, again and again."""
    buffer = gone_on(kind, root, 0)
    ready.touch()
    for step in range(1 << 20):
        change(kind, buffer, step)
        save(buffer, root)
