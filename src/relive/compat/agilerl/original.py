"""AgileRL's own classes, where it is installed: its trainers recognise buffers by their class."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def original(module: str, name: str) -> Any:
    """The class `name` of AgileRL's `module`, to inherit from; without AgileRL a plain object.

    What counts is the installed distribution: a folder of that name is not enough.
    """
    try:
        version("agilerl")
    except PackageNotFoundError:
        return object
    return getattr(importlib.import_module(f"agilerl.{module}"), name)


def original_or(module: str, ours: type) -> Any:
    """AgileRL's class of the same name as ours, which inherits from it; without AgileRL ours."""
    theirs = original(module, ours.__name__)
    return ours if theirs is object else theirs
