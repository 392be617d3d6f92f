"""Every stored transition is as likely as any other."""

from __future__ import annotations

from dataclasses import dataclass

from relive.replay.samplers.sampler import Chosen, Sampler


@dataclass(unsafe_hash=True)
class Uniform(Sampler):
    """Draws uniformly, with replacement."""

    def sample(self, count: int) -> Chosen:
        return self.storage.draw(count, self.rng), None
