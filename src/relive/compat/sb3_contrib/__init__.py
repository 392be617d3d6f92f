# pyright: reportMissingImports=false
"""sb3-contrib's algorithms and rollout buffers on this library's core.

    from relive.compat.sb3_contrib import MaskablePPO, RecurrentPPO       # on our rollout buffers

Every module and name of sb3-contrib can be imported below this package: what is not ours is its own.
"""

import importlib
from pathlib import Path
from typing import Any

from relive.compat.forwarding import forward
from relive.errors import explain

try:
    import sb3_contrib  # noqa: F401
except ImportError as error:
    raise ImportError(
        explain("relive.compat.sb3_contrib", "sb3-contrib to be installed", error, "Run pip install sb3-contrib.")
    ) from error

from relive.compat.sb3_contrib.algorithms import QRDQN, TQC, TRPO, CrossQ, MaskablePPO, RecurrentPPO

__all__ = ["QRDQN", "TQC", "TRPO", "CrossQ", "MaskablePPO", "RecurrentPPO"]

forward("relive.compat.sb3_contrib", Path(__file__).parent, "sb3_contrib")


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("sb3_contrib"), name)
