"""Random episodes whose rows have known ids, to test samplers that depend on the age of rows."""

from __future__ import annotations

import numpy as np

import relive as rl


class RandomEpisodes:
    """Environments whose episodes end at random; the observation of every step is another number."""

    def __init__(self, replay: rl.ReplayBuffer, seed: int, ends: float = 0.2) -> None:
        self.replay, self._rng, self._ends = replay, np.random.default_rng(seed), ends
        self._next_number, self._resets = 0.0, np.zeros(replay.num_envs or 1, bool)
        self._obs = self._new_obs()

    def _new_obs(self) -> np.ndarray:
        count = self.replay.num_envs or 1
        numbers = self._next_number + np.arange(count)
        self._next_number += count
        return numbers[:, None]

    def step(self, envs: np.ndarray | None = None) -> list[int]:
        """Add one step of the environments `envs`, or of all; returns the ids of the new rows."""
        old_ids = set(self.replay.ids().tolist())
        env_ids = np.arange(self.replay.num_envs or 1) if envs is None else envs
        next_obs, first_obs = self._new_obs(), self._new_obs()
        ends = self._rng.random(len(env_ids)) < self._ends
        no_flags = np.zeros(len(env_ids), bool)
        obs = self._obs[env_ids]
        self.replay.add(obs, obs[:, 0], obs[:, 0], ends, no_flags, next_obs[env_ids], env_ids=env_ids.tolist())
        self._obs[env_ids] = np.where(ends[:, None], first_obs[env_ids], next_obs[env_ids])
        return sorted(set(self.replay.ids().tolist()) - old_ids)
