# pyright: reportMissingImports=false
"""Stable-Baselines3's `her`, with our buffer."""

from stable_baselines3.her import GoalSelectionStrategy

from relive.compat.stable_baselines3.hindsight import HerReplayBuffer

__all__ = ["GoalSelectionStrategy", "HerReplayBuffer"]
