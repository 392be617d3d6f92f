"""A few lines of code for each known difference, which need only that library, and their output.

The files of this folder are read, not imported: a title with the library's name, a sentence with its version and the
date, and for each case the figures of the suite, the code and its output.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Reproduction(NamedTuple):
    """Code that needs only its library, and the text that it prints."""

    code: str
    prints: str


_CASE = re.compile(r"^## (T\d+) [^\n]*\n\n[^\n]*\n\n```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL | re.MULTILINE)


def _read(text: str) -> tuple[str, dict[str, Reproduction]]:
    name = text.splitlines()[0].removeprefix("# ")
    return name, {number: Reproduction(code.strip(), prints.strip()) for number, code, prints in _CASE.findall(text)}


REPRODUCTIONS: dict[str, dict[str, Reproduction]] = dict(
    _read(file.read_text("utf-8")) for file in sorted(Path(__file__).parent.glob("*.md"))
)
"""Reproductions by the name of the library and the number of the case."""
