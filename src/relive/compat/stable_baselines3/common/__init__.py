"""Package on the import path of Stable-Baselines3's buffers."""
