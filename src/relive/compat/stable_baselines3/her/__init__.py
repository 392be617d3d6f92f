# pyright: reportMissingImports=false
"""Stable-Baselines3's `her`: hindsight on relive's core."""

from stable_baselines3.her import GoalSelectionStrategy

from relive.compat.stable_baselines3.her.her_replay_buffer import HerReplayBuffer

__all__ = ["GoalSelectionStrategy", "HerReplayBuffer"]
