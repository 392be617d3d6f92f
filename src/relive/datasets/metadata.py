"""Files that anybody may have written: their JSON, and errors that name them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from relive.errors import SchemaError, explain

MOST_BYTES = 1 << 21
"""No document is longer: parsed JSON takes up to 24 times as much memory."""


def parsed(where: str, body: bytes) -> dict[str, Any]:
    """The object that a document has."""
    if len(body) > MOST_BYTES:
        raise wrong(where, f"at most {MOST_BYTES} bytes", len(body))
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise wrong(where, "JSON", error) from None
    if not isinstance(found, dict):
        raise wrong(where, "a JSON object", reprlib.repr(found))
    return found


def sizes(where: str, value: Any, least: int = 0) -> tuple[int, ...]:
    """The sizes of axes."""
    is_list = isinstance(value, list) and len(value) <= 16
    if not is_list or not all(type(size) is int and least <= size < 1 << 62 for size in value):
        raise wrong(where, f"a list of at most 16 sizes from {least} on", reprlib.repr(value))
    return tuple(value)


@contextmanager
def damage_named(where: str, expected: str) -> Iterator[None]:
    """Whatever a library raises over damaged bytes, as a SchemaError that names the file.

    Only calls of the library belong inside.
    """
    try:
        yield
    except (SchemaError, ImportError):
        raise
    except Exception as error:
        raise SchemaError(explain(where, expected, f"{type(error).__name__}: {error}", "Copy it again.")) from error


def wrong(where: str, expected: str, got: object) -> SchemaError:
    """The error for a file that is damaged, or forged."""
    return SchemaError(explain(where, expected, got, "Do not read a dataset that you do not trust; write it anew."))
