"""Files that anybody may have written: limits of memory, their JSON, errors that name them, and optional libraries."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from relive.errors import SchemaError, explain

MAX_JSON_BYTES = 1 << 21
"""The longest document that is parsed: parsed JSON takes up to 24 times as much memory."""

_SMALL_BUFFER, _EXPANSION = 1 << 24, 1000
"""Limits of a new buffer: bytes, and bytes per byte of its file. Deflate, which zip and HDF5 use, and videos come near
that; bombs exceed it."""


def import_extra(module: str, extra: str, title: str | None = None) -> Any:
    """Import an optional library; raises an ImportError that names the extra of relive to install."""
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f'Run pip install ".[{extra}]" in a clone of relive.'
        raise ImportError(explain("relive.datasets", f"{title or module} to be installed", error, remedy)) from error


def memory_budget(nbytes: int) -> int:
    """The memory that a reader may take for a dataset of `nbytes` bytes, beside the buffer that it fills."""
    return (64 << 20) + 20 * nbytes


def decode_budget(nbytes: int) -> int:
    """The share of the memory budget for what a library decodes at once: a chunk, a page, or copies of a step."""
    return memory_budget(nbytes) * 3 // 8


def require_similar_size(where: str, rows: int, row_bytes: int, file_bytes: int) -> None:
    """Raise if a buffer that a reader would make for a file is much larger than the file."""
    most = _SMALL_BUFFER + _EXPANSION * file_bytes
    if rows * row_bytes > most:
        expected = f"steps of at most {most:,} bytes, {_EXPANSION:,} times the {file_bytes:,} of the file"
        remedy = "If you trust it, make a buffer of that size and pass it."
        raise SchemaError(explain(where, expected, f"{rows * row_bytes:,} bytes in {rows:,} rows", remedy))


def parse_json(where: str, body: bytes, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object of a document of at most `most` bytes."""
    if len(body) > most:
        raise damage(where, f"at most {most} bytes", "more")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise damage(where, "JSON", error) from None
    if not isinstance(document, dict):
        raise damage(where, "a JSON object", reprlib.repr(document))
    return document


def parse_sizes(where: str, value: Any, least: int = 0) -> tuple[int, ...]:
    """The sizes of at most 16 axes, from a document."""
    is_list = isinstance(value, list) and len(value) <= 16
    if not is_list or not all(type(size) is int and least <= size < 1 << 62 for size in value):
        raise damage(where, f"a list of at most 16 sizes from {least} on", reprlib.repr(value))
    return tuple(value)


@contextmanager
def wrap_errors(where: str, expected: str) -> Iterator[None]:
    """Turn errors that a library raises for damaged bytes into a SchemaError that names the file.

    Only calls of the library belong inside.
    """
    try:
        yield
    except (SchemaError, ImportError):
        raise
    except FileNotFoundError as error:
        got = f"no file {error.filename or where}"
        raise SchemaError(explain(where, expected, got, "Check the path, and that the dataset is complete.")) from error
    except Exception as error:
        raise SchemaError(explain(where, expected, f"{type(error).__name__}: {error}", "Copy it again.")) from error


def damage(where: str, expected: str, got: object) -> SchemaError:
    """The error for a file that is damaged, or forged."""
    return SchemaError(explain(where, expected, got, "Do not read a dataset that you do not trust; write it anew."))
