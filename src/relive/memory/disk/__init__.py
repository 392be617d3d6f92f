"""Replay buffers in files: larger than memory, and found again after a kill or a loss of power."""
