"""Functions for processes that are killed."""

from __future__ import annotations

from pathlib import Path

from relive.checkpoint.saving import save
from tests.checkpoint.traffic import KINDS
from tests.faults.checkpoint.disk import change, load_and_change, make_killing_files


def save_until(kind: str, root: Path, point: int) -> None:
    """Load the newest checkpoint, change and save the buffer, and die at an operation."""
    save(load_and_change(kind, root), root, files=make_killing_files(point))


def save_first(kind: str, root: Path, point: int) -> None:
    """Save into an empty folder and die at an operation."""
    buffer = KINDS[kind].make()
    for n in range(17):
        KINDS[kind].act(buffer, n)
    save(buffer, root, files=make_killing_files(point))


def save_until_killed(kind: str, root: Path, ready: Path) -> None:
    """Change and save the buffer until the process is killed."""
    buffer = load_and_change(kind, root, 0)
    ready.touch()
    for step in range(1 << 20):
        change(kind, buffer, step)
        save(buffer, root)
