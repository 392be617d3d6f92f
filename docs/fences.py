"""An extension of the reference that fences the examples in docstrings, which begin with >>> and are run as tests."""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)


class Fences(griffe.Extension):
    """Puts a fence around every paragraph that begins with >>>."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
