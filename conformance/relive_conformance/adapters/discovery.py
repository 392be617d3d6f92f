"""Finding the adapters whose library is installed, and the reasons why others are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from relive_conformance.adapters.protocol import Adapter

MODULES = (
    "relive", "stable_baselines3", "torchrl", "tianshou", "cpprb", "agilerl", "skrl", "rsl_rl", "flashbax", "rlox",
    "cleanrl",
)  # fmt: skip
"""The modules of this package that have a function `adapter()`."""


@dataclass(frozen=True)
class Missing:
    """An adapter whose library could not be imported."""

    name: str
    reason: str


@dataclass(frozen=True)
class Discovery:
    """The adapters that were found, and those that are missing."""

    adapters: list[Adapter]
    missing: list[Missing]


def discover(modules: Sequence[str] = MODULES) -> Discovery:
    """Import each adapter; a library that cannot be imported is reported, never raised."""
    discovery = Discovery([], [])
    for module in modules:
        try:
            discovery.adapters.append(import_module(f"{__package__}.{module}").adapter())
        # A half-installed library may raise any error at import: a missing symbol, a binary of another ABI.
        except Exception as error:
            discovery.missing.append(Missing(module, f"{type(error).__name__}: {error}"))
    return discovery
