"""Row ids that are unique in a whole service, and that a restarted shard does not issue again."""

from __future__ import annotations

import numpy as np

from relive.errors import explain

ROWS = 1 << 32
"""More rows than an environment can have."""


class ShardIds:
    """The ids of one shard: (row + life · 2^32) · num_envs + env.

    In a shard's first life they equal the ids of a single buffer. A shard that continues from a checkpoint numbers new
    rows like the rows that it has lost; the number of its life tells them apart.
    """

    def __init__(self, envs: range, num_envs: int, starts: np.ndarray, life: int) -> None:
        self.starts = starts
        """The first row of each environment in the newest lives [lives, envs]; a life ends where the next starts."""
        self.life = life
        """The number of the newest life."""
        self._envs, self._num_envs = envs, num_envs
        if (life + 1) * ROWS * num_envs >= 1 << 63:
            raise OverflowError(explain("index", "ids below 2^63", f"{life} restarts", "Start a new service."))

    def restarted(self, head: np.ndarray, oldest: np.ndarray) -> ShardIds:
        """The ids after a restart: rows from `head` [envs] on have a new life; lives before `oldest` are dropped."""
        starts = np.concatenate([self.starts, head[None]])
        gone = int((starts[1:] <= oldest).all(1).sum())
        return ShardIds(self._envs, self._num_envs, starts[gone:], self.life + 1)

    def to_service(self, ids: np.ndarray) -> np.ndarray:
        """The service's ids [B] of the rows with the ids `ids` in the shard's buffer."""
        row, env = np.divmod(ids, len(self._envs))
        before = (self.starts[:, env] <= row).sum(0)
        life = self.life - len(self.starts) + before
        return (row + life * ROWS) * self._num_envs + env + self._envs.start

    def to_shard(self, ids: np.ndarray, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids in the shard's buffer of the service's `ids` [B], and a mask of the rows that were not lost."""
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
        return inside, (row < head[env]) & (self.to_service(inside) == ids)
