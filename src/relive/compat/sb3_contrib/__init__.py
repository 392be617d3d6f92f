# pyright: reportMissingImports=false
"""sb3-contrib's algorithms and rollout buffers on this library's core.

    from relive.compat.sb3_contrib import MaskablePPO, RecurrentPPO       # on our rollout buffers

Every module and name of sb3-contrib can be imported below this package: what is not ours is its own.
"""

from relive.compat.forwarding import forward, in_place, names_of
from relive.errors import explain

try:
    from sb3_contrib import ARS
except ImportError as error:
    raise ImportError(
        explain("relive.compat.sb3_contrib", "sb3-contrib to be installed", error, "Run pip install sb3-contrib.")
    ) from error

from relive.compat.sb3_contrib.algorithms import QRDQN, TQC, TRPO, CrossQ, MaskablePPO, RecurrentPPO

__all__ = ["ARS", "QRDQN", "TQC", "TRPO", "CrossQ", "MaskablePPO", "RecurrentPPO"]

forward("sb3_contrib", ours=in_place(QRDQN, TQC, TRPO, CrossQ, MaskablePPO, RecurrentPPO))

__getattr__ = names_of("sb3_contrib")
