"""rsl_rl's storage on relive's core."""

from relive.compat.rsl_rl.storage.rollout_storage import RolloutStorage

__all__ = ["RolloutStorage"]
