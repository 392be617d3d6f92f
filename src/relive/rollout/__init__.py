"""The on-policy buffer."""

from relive.rollout.buffer import RolloutBuffer

__all__ = ["RolloutBuffer"]
