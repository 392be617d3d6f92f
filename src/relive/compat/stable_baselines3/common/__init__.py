"""Stable-Baselines3's `common`: buffers are ours, all other modules its own."""
