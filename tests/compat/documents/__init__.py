"""Python code blocks of the originals' documents and of our migration guides."""

from __future__ import annotations

import re
from pathlib import Path

_GUIDES = Path(__file__).parents[3] / "docs" / "migrating"


def blocks(name: str) -> list[str]:
    """Return the Python blocks of an original's document."""
    return _blocks(Path(__file__).parent / f"{name}.md")


def guide(name: str) -> list[str]:
    """Return the Python blocks of our guide to migrating from a library."""
    return _blocks(_GUIDES / f"{name}.md")


def _blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
