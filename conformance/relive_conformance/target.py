"""The subject of a test, given as `my_package:MyBuffer` or as an object, as an `Adapter`."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from relive_conformance.adapters.protocol import Adapter

_REMEDY = "Pass a class with add, sample and __len__ (the README of relive-conformance shows one), or an Adapter."


def find(target: str) -> Adapter:
    """Import `module:attribute`, also from the working directory."""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"target: expected module:attribute, got {target!r}. {_REMEDY}")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return as_adapter(getattr(import_module(module), attribute))
    finally:
        sys.path.remove(here)


def as_adapter(subject: Any) -> Adapter:
    """Return the adapter of an Adapter, of a function that makes one, or of a replay buffer's class."""
    if isinstance(subject, Adapter):
        return subject
    if not callable(subject):
        raise TypeError(f"target: expected a class, a function or an Adapter, got {subject!r}. {_REMEDY}")
    if not inspect.isclass(subject) and not inspect.signature(subject).parameters:
        return as_adapter(subject())
    make: Any = subject
    return Adapter(name=getattr(subject, "__qualname__", repr(subject)), version="", replay=make)
