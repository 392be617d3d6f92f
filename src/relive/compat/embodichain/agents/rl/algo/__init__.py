"""Where releases before 0.2.3 had them."""

from relive.compat.embodichain.learning.rl.algo import compute_gae, compute_group_advantage

__all__ = ["compute_gae", "compute_group_advantage"]
