"""`compute_gae` at its path in releases before 0.2.3."""

from relive.compat.embodichain.learning.rl.algo.common import compute_gae

__all__ = ["compute_gae"]
