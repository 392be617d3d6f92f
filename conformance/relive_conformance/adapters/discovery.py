"""Finding the peers whose library is installed, and the reasons why others are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from relive.conformance.peers.protocol import Peer

MODULES = (
    "ours", "stable_baselines3", "torchrl", "tianshou", "cpprb", "agilerl", "skrl", "rsl_rl", "flashbax", "rlox",
    "cleanrl",
)  # fmt: skip
"""The modules of this package that have a function `peer()`."""


@dataclass(frozen=True)
class Missing:
    """An adapter whose library could not be imported."""

    name: str
    reason: str


@dataclass(frozen=True)
class Discovery:
    """The peers that were found, ours first, and those that are missing."""

    peers: list[Peer]
    missing: list[Missing]


def discover(modules: Sequence[str] = MODULES) -> Discovery:
    """Import each adapter; a library that cannot be imported is reported, never raised."""
    found = Discovery([], [])
    for module in modules:
        try:
            found.peers.append(import_module(f"{__package__}.{module}").peer())
        # A half-installed library may raise any error at import: a missing symbol, a binary of another ABI.
        except Exception as error:
            found.missing.append(Missing(module, f"{type(error).__name__}: {error}"))
    return found
