"""Libraries that only datasets need: imported when a dataset is read, with a sentence where one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from relive.errors import explain


def required(module: str, extra: str, title: str | None = None) -> Any:
    """The module; raises an ImportError that names the extra of relive to install."""
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f'Run pip install ".[{extra}]" in a clone of relive.'
        expected = f"{title or module} to be installed"
        raise ImportError(explain("relive.datasets", expected, error, remedy)) from error
