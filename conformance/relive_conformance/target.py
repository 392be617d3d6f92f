"""The subject of a test, given as `my_package:MyBuffer` or as an object, as a `Peer`."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from relive.conformance.peers.protocol import Peer
from relive.errors import explain

_REMEDY = "Pass a class with add, sample and __len__ (docs/conformance.md shows one in ten lines), or a Peer."


def find(target: str) -> Peer:
    """Import `module:attribute`, also from the working directory."""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise ValueError(explain("conformance", "module:attribute", repr(target), _REMEDY))
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return as_peer(getattr(import_module(module), attribute))
    finally:
        sys.path.remove(here)


def as_peer(subject: Any) -> Peer:
    """The `Peer` of a subject: a Peer, a function without arguments that makes one, or a replay buffer's class."""
    if isinstance(subject, Peer):
        return subject
    if not callable(subject):
        raise TypeError(explain("conformance", "a class, a function or a Peer", repr(subject), _REMEDY))
    if not inspect.isclass(subject) and not inspect.signature(subject).parameters:
        return as_peer(subject())
    make: Any = subject
    return Peer(name=getattr(subject, "__qualname__", repr(subject)), version="", replay=make)
