"""Checkpoints: whole or not at all, only what is new, every byte checked, and no code in them."""

from recollect.checkpoint.loading import check, load
from recollect.checkpoint.saving import save

__all__ = ["check", "load", "save"]
