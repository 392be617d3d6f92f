# pyright: reportMissingImports=false
"""Stable-Baselines3's `common.buffers`, with relive's buffers under its names."""

from stable_baselines3.common.buffers import BaseBuffer

from relive.compat.stable_baselines3.replay import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from relive.compat.stable_baselines3.rollout import DictRolloutBuffer, RolloutBuffer

__all__ = ["BaseBuffer", "DictReplayBuffer", "DictRolloutBuffer", "NStepReplayBuffer", "ReplayBuffer", "RolloutBuffer"]
