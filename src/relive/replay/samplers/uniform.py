"""Every stored transition is as likely as any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from relive.randomness import Randomness
from relive.replay.samplers.protocol import Drawn
from relive.replay.storage import ReplayStorage


@dataclass(frozen=True)
class Uniform:
    """Draws uniformly, with replacement."""

    def start(self, storage: ReplayStorage, random: Randomness) -> _Draws:
        return _Draws(storage, random)


class _Draws:
    wants_touched = False

    def __init__(self, storage: ReplayStorage, random: Randomness) -> None:
        self._storage, self._random = storage, random

    def snapshot(self) -> None: ...

    def restore(self, snapshot: None) -> None: ...

    def draw(self, count: int) -> Drawn:
        return Drawn(self._storage.draw(count, self._random))

    def written(self) -> None: ...

    def cleared(self) -> None: ...

    def saved(self) -> dict[str, torch.Tensor]:
        return {}

    def resume(self, saved: Mapping[str, torch.Tensor]) -> None: ...
