"""Stable-Baselines3's `common`: buffers are ours, all other modules its own."""

from relive.compat.forwarding import names_of

__getattr__ = names_of("stable_baselines3.common")
