"""Only the newest rows, each as likely as any other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relive.replay.ring import TRANSITION
from relive.replay.samplers.sampler import Chosen, Sampler
from relive.schema.checks import positive
from relive.schema.vocabulary import suggests_init_keywords


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class Recent(Sampler):
    """Draws uniformly, with replacement, from the newest `window` transitions of every environment.

    Older rows stay stored, for views that read around a row, and for another sampler after a reload.

    Args:
        window: transitions of each environment that may be drawn, at least 1; fewer where fewer are stored.
    """

    window: int

    def __post_init__(self) -> None:
        positive("Recent.window", self.window)

    def on_bind(self) -> None:
        self._ring, device = self.storage.ring, self.storage.device
        # Between two transitions lie at most two rows that hold only an observation.
        self._back = torch.arange(min(3 * self.window + 3, self._ring.slots), device=device).unsqueeze(1)
        self._envs = torch.arange(self._ring.num_envs, device=device)

    def sample(self, count: int) -> Chosen:
        slots, up_to = self._newest(self._back)
        if up_to.is_cpu and not up_to[-1]:  # so many rows in a row are withheld: see `Ring.withhold`
            slots, up_to = self._newest(torch.arange(self._ring.slots, device="cpu").unsqueeze(1))
        return slots[torch.searchsorted(up_to, self.rng.below(up_to[-1], count), right=True)], None

    def _newest(self, back: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots `back` rows before the newest ones, and how many transitions of the window lie up to each."""
        ring = self._ring
        rows = ring.newest() - back  # [rows, N], the newest first
        slots = ring.at(rows.clamp(min=0), self._envs)
        drawable = (rows >= ring.floor) & (ring.kind_at(slots) == TRANSITION)
        drawable &= drawable.cumsum(0) <= self.window
        return slots.view(-1), drawable.view(-1).cumsum(0)
