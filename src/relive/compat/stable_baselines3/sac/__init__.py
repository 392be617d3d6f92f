# pyright: reportMissingImports=false
"""Stable-Baselines3's `sac`, with our buffers where it chooses them."""

from stable_baselines3.sac import CnnPolicy, MlpPolicy, MultiInputPolicy

from relive.compat.stable_baselines3.defaults import SAC

__all__ = ["SAC", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
