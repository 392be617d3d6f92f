"""The advantages that EmbodiChain's algorithms compute from a rollout."""

from relive.compat.embodichain.learning.rl.algo.common import compute_gae, compute_group_advantage

__all__ = ["compute_gae", "compute_group_advantage"]
