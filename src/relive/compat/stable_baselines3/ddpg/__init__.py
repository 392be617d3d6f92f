# pyright: reportMissingImports=false
"""Stable-Baselines3's `ddpg`, with our buffers where it chooses them."""

from stable_baselines3.ddpg import CnnPolicy, MlpPolicy, MultiInputPolicy

from relive.compat.stable_baselines3.defaults import DDPG

__all__ = ["DDPG", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
