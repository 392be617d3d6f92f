# pyright: reportMissingImports=false
"""Stable-Baselines3's `a2c`, with our buffers where it chooses them."""

from stable_baselines3.a2c import CnnPolicy, MlpPolicy, MultiInputPolicy

from relive.compat.stable_baselines3.defaults import A2C

__all__ = ["A2C", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
