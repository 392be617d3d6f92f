"""Checkpoints: atomic, incremental, protected by checksums, and free of executable code."""
