"""Stable-Baselines3's `her.her_replay_buffer`, with our buffer."""

from relive.compat.stable_baselines3.hindsight import HerReplayBuffer

__all__ = ["HerReplayBuffer"]
