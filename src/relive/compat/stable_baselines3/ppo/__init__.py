# pyright: reportMissingImports=false
"""Stable-Baselines3's `ppo`, with our buffers where it chooses them."""

from stable_baselines3.ppo import CnnPolicy, MlpPolicy, MultiInputPolicy

from relive.compat.stable_baselines3.defaults import PPO

__all__ = ["PPO", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
