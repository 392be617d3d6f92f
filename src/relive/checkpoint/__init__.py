"""Checkpoints: whole or not at all, only what is new, every byte checked, and no code in them."""

from relive.checkpoint.loading import check, load
from relive.checkpoint.saving import save

__all__ = ["check", "load", "save"]
