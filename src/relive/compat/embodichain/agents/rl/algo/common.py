"""Where releases before 0.2.3 had it."""

from relive.compat.embodichain.learning.rl.algo.common import compute_gae

__all__ = ["compute_gae"]
