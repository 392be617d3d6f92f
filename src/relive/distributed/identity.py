"""Ids of rows that hold for a whole service, and that a shard which starts again does not give twice."""

from __future__ import annotations

import numpy as np

from relive.errors import explain

ROWS = 1 << 32
"""An environment has fewer rows than this."""


class Identity:
    """The ids of one shard: (row + life · 2^32) · num_envs + env.

    That is the id of a single buffer as long as the shard lives. A shard that goes on from a checkpoint gives new rows
    the numbers of those that it has lost; a new life tells them apart.
    """

    def __init__(self, envs: range, num_envs: int, starts: np.ndarray, life: int) -> None:
        self.starts = starts
        """The first row of each environment in the newest lives [lives, envs]; a life ends where the next starts."""
        self.life = life
        """The number of the last of them."""
        self._envs, self._num_envs = envs, num_envs
        if (life + 1) * ROWS * num_envs >= 1 << 63:
            raise OverflowError(explain("index", "ids below 2^63", f"{life} restarts", "Start a new service."))

    def reborn(self, head: np.ndarray, oldest: np.ndarray) -> Identity:
        """The shard starts again: rows from `head` [envs] on are of a new life, and those before `oldest` forgotten."""
        starts = np.concatenate([self.starts, head[None]])
        gone = int((starts[1:] <= oldest).all(1).sum())
        return Identity(self._envs, self._num_envs, starts[gone:], self.life + 1)

    def outside(self, ids: np.ndarray) -> np.ndarray:
        """What the service calls the rows that the shard's buffer calls `ids` [B]."""
        row, env = np.divmod(ids, len(self._envs))
        before = (self.starts[:, env] <= row).sum(0)
        life = self.life - len(self.starts) + before
        return (row + life * ROWS) * self._num_envs + env + self._envs.start

    def inside(self, ids: np.ndarray, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The buffer's ids of rows that the service calls `ids` [B], and which of them are not lost."""
        rows, env = np.divmod(ids, self._num_envs)
        env = env - self._envs.start
        life, row = np.divmod(rows, ROWS)
        inside = row * len(self._envs) + env
        never = (
            (ids < 0) | (life > self.life) | ((life == self.life) & ((row >= head[env]) | (row < self.starts[-1, env])))
        )
        if never.any():
            at = int(never.nonzero()[0][0])
            remedy = "Pass ids from batch['index']."
            raise IndexError(explain("index", "the id of a stored transition", int(ids[at]), remedy))
        return inside, (row < head[env]) & (self.outside(inside) == ids)
