"""EmbodiChain's advantages at their path in releases before 0.2.3."""

from relive.compat.embodichain.learning.rl.algo import compute_gae, compute_group_advantage

__all__ = ["compute_gae", "compute_group_advantage"]
