"""Returns and lengths of finished episodes, for the demo's progress bar and picture."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Episode(NamedTuple):
    """One finished episode."""

    step: int
    """How many transitions had been made in all environments together when it ended."""
    return_: float
    length: int


class Episodes:
    """Counts episodes from rewards and flags; steps that only reset an environment (NEXT_STEP) are ignored."""

    def __init__(self, num_envs: int, window: int = 100) -> None:
        self.window = window
        self.num_transitions = 0
        self.finished: list[Episode] = []
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, dtype=np.int64)
        self._resetting = np.zeros(num_envs, dtype=np.bool_)

    def update(self, reward: NDArray[np.float64], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Count one step of every environment."""
        played = ~self._resetting
        self.num_transitions += int(played.sum())
        self._return += np.where(played, reward, 0.0)
        self._length += played
        ended = (terminated | truncated) & played
        for env in np.flatnonzero(ended):
            self.finished.append(Episode(self.num_transitions, float(self._return[env]), int(self._length[env])))
        self._return[ended] = 0.0
        self._length[ended] = 0
        self._resetting = ended

    @property
    def mean_return(self) -> float:
        """Over the last `window` episodes; nan before the first end."""
        recent = self.finished[-self.window :]
        return sum(episode.return_ for episode in recent) / len(recent) if recent else float("nan")

    @property
    def mean_length(self) -> float:
        """Over the last `window` episodes; nan before the first end."""
        recent = self.finished[-self.window :]
        return sum(episode.length for episode in recent) / len(recent) if recent else float("nan")

    @property
    def window_is_full(self) -> bool:
        """Whether the means are over `window` episodes yet."""
        return len(self.finished) >= self.window
