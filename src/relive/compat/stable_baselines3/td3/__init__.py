# pyright: reportMissingImports=false
"""Stable-Baselines3's `td3`, with our buffers where it chooses them."""

from stable_baselines3.td3 import CnnPolicy, MlpPolicy, MultiInputPolicy

from relive.compat.stable_baselines3.defaults import TD3

__all__ = ["TD3", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
