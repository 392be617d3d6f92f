# pyright: reportMissingImports=false
"""Stable-Baselines3's `dqn`, with our buffers where it chooses them."""

from stable_baselines3.dqn import CnnPolicy, MlpPolicy, MultiInputPolicy

from relive.compat.stable_baselines3.defaults import DQN

__all__ = ["DQN", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
