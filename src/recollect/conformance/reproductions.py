"""Three lines for each difference that was seen, with that library alone, and what they print."""

from __future__ import annotations

from typing import NamedTuple


class Reproduction(NamedTuple):
    """Code that needs nothing but the library it is about, and the text that it prints."""

    code: str
    prints: str


REPRODUCTIONS: dict[str, dict[str, Reproduction]] = {}
"""By the name of the library and the number of the case."""
