"""The code blocks of the documents that the adapters follow, as printed there."""

from __future__ import annotations

import re
from pathlib import Path


def blocks(name: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (Path(__file__).parent / f"{name}.md").read_text(), re.DOTALL)
