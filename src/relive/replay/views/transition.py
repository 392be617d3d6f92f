"""One step: where it started, what was done, what came of it, where it led."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from relive.randomness import Randomness
from relive.replay.store import Leaves, Reading, ReplayStore


@dataclass(frozen=True)
class Transition:
    """Every field of the row and `next_obs`, the state it led to before any reset."""

    fused: ClassVar[Reading] = Reading()

    def read(self, store: ReplayStore, slots: torch.Tensor, random: Randomness) -> Leaves:
        return store.transitions(slots)

    def windows(self, store: ReplayStore, slots: torch.Tensor) -> torch.Tensor:
        """The steps that are read: [B, 1] flat slots."""
        return slots.unsqueeze(1)

    def reduce(self, store: ReplayStore, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves:
        """A batch from its steps [B, 1, …]."""
        return {path: leaf.squeeze(1) for path, leaf in steps.items()}
