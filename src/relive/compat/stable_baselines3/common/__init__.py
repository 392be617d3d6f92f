"""A part of the path that Stable-Baselines3 has its buffers at."""
