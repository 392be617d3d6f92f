"""Checkpoints: whole or not at all, only what is new, every byte checked, and no code in them."""
