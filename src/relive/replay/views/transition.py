"""One step: where it started, what was done, what came of it, where it led."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relive.randomness import Randomness
from relive.replay.storage import ReplayStorage
from relive.replay.views.protocol import Leaves


@dataclass(frozen=True)
class Transition:
    """Every field of the row and `next_obs`, the state it led to before any reset."""

    def read(self, storage: ReplayStorage, slots: torch.Tensor, random: Randomness) -> Leaves:
        return storage.transitions(slots)

    def windows(self, storage: ReplayStorage, slots: torch.Tensor) -> torch.Tensor:
        """The steps that are read: [B, 1] flat slots."""
        return slots.unsqueeze(1)

    def reduce(self, storage: ReplayStorage, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves:
        """A batch from its steps [B, 1, …]."""
        return {path: leaf.squeeze(1) for path, leaf in steps.items()}
