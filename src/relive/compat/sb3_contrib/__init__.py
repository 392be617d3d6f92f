# pyright: reportMissingImports=false
"""sb3-contrib's algorithms and rollout buffers on relive's core.

    from relive.compat.sb3_contrib import MaskablePPO, RecurrentPPO       # on relive's rollout buffers

`relive.compat.patch("sb3_contrib")` lets its own algorithms choose relive's buffers.
"""

from relive.errors import explain

try:
    from sb3_contrib import ARS
except ImportError as error:
    raise ImportError(
        explain("relive.compat.sb3_contrib", "sb3-contrib to be installed", error, "Run pip install sb3-contrib.")
    ) from error

from relive.compat.sb3_contrib.algorithms import QRDQN, TQC, TRPO, CrossQ, MaskablePPO, RecurrentPPO

__all__ = ["ARS", "QRDQN", "TQC", "TRPO", "CrossQ", "MaskablePPO", "RecurrentPPO"]
