"""Every stored transition is as likely as any other."""

from __future__ import annotations

from dataclasses import dataclass

from relive.randomness import Randomness
from relive.replay.samplers.protocol import Drawn, Draws
from relive.replay.store import ReplayStore


@dataclass(frozen=True)
class Uniform:
    """Draws uniformly, with replacement."""

    def start(self, store: ReplayStore, random: Randomness) -> _Run:
        return _Run(store, random)


class _Run(Draws):
    is_uniform = True
    independent_draws = True
    atomic_draws = True

    def __init__(self, store: ReplayStore, random: Randomness) -> None:
        self._store, self._random = store, random

    def draw(self, count: int) -> Drawn:
        return Drawn(self._store.draw(count, self._random))
