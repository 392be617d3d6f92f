# pyright: reportMissingImports=false
"""Rows at positions: every step of Stable-Baselines3's arrays is a row of the core, with its next observation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from relive.compat.stable_baselines3.arrays import Arrays
from relive.compat.stable_baselines3.layout import numpy_of, torch_of
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer as Core
from relive.replay.views import NStep, Transition

_MEMORY = {"observations": "obs", "next_observations": "next_obs", "actions": "action", "rewards": "reward"}
_CPU = torch.device("cpu")


class StoredRows:
    """`size` positions of `n_envs` environments; the arrays are the memory itself."""

    def __init__(self, size: int, n_envs: int, **settings: Any) -> None:
        self.size, self.n_envs = size, n_envs
        self.core = Core(size * n_envs, num_envs=n_envs, next_obs="stored", **settings)
        memory: Any = self.core.columns
        arrays = {name: numpy_of(memory[ours]) for name, ours in _MEMORY.items()}
        self.arrays: dict[str, Any] = {
            name: Arrays(each) if isinstance(each, dict) else each for name, each in arrays.items()
        }
        self._dones, self._timeouts = (np.zeros((size, n_envs), np.float32) for _ in range(2))
        self.arrays |= {"dones": self._dones, "timeouts": self._timeouts}
        self._never, self._in_time = np.zeros(n_envs, np.bool_), np.zeros(n_envs, np.float32)
        self.written = 0
        """How many steps of every environment were added."""

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return self.core.nbytes + self._dones.nbytes + self._timeouts.nbytes

    def array(self, name: str) -> Any:
        """The array of that name, or the dict of arrays."""
        return self.arrays[name]

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, timeout: Any, beside: dict[str, Any]
    ) -> None:
        """Store one step of every environment at the next position."""
        never, pos = self._never, self.written % self.size
        self.core.add(obs, action, reward, never, never, next_obs, **beside)
        self._dones[pos] = done
        self._timeouts[pos] = self._in_time if timeout is None else timeout
        self.written += 1

    def size_at(self, pos: int, is_full: bool) -> int:
        """How many positions before `pos` have a step of every environment."""
        return self.size if is_full else pos

    def state(self) -> dict[str, Any]:
        """What to save beside the core."""
        return {"dones": self._dones.copy(), "timeouts": self._timeouts.copy(), "written": self.written}

    def load(self, state: dict[str, Any]) -> None:
        """Go on with what was saved."""
        self._dones[...], self._timeouts[...], self.written = state["dones"], state["timeouts"], state["written"]

    def sample(self, batch_size: int, view: Any) -> TensorDict:
        """Random rows."""
        return self._completed(self.core.sample(batch_size), view)

    def read(self, positions: np.ndarray, envs: np.ndarray, view: Any) -> TensorDict:
        """The rows at these positions of these environments."""
        newest = self.written - 1
        rows = newest - (newest - positions) % self.size
        if (rows < 0).any():
            remedy = "Pass positions of stored transitions."
            raise IndexError(explain("batch_inds", "stored positions", int(positions[rows < 0][0]), remedy))
        return self._completed(self.core.read(torch.from_numpy(rows * self.n_envs + envs)), view)

    def cut(self, envs: np.ndarray) -> None:
        """The newest steps of these environments end their episodes, as a time limit does."""
        newest = (self.written - 1) % self.size
        self._dones[newest, envs] = self._timeouts[newest, envs] = 1

    def _completed(self, batch: TensorDict, view: Any) -> TensorDict:
        """A batch with the ends of its steps, and with what the view makes of them."""
        row, envs = np.divmod(batch["index"].numpy(), self.n_envs)
        time = row % self.size
        if not isinstance(view, Transition):
            time = self._n_steps(batch, time, envs, view)
        ended = self._dones[time, envs] * (1 - self._timeouts[time, envs])
        batch.set("terminated", torch.from_numpy(ended))
        return batch

    def _n_steps(self, batch: TensorDict, time: np.ndarray, envs: np.ndarray, view: Any) -> np.ndarray:
        """Put n-step rewards, where they led to and their discounts into a batch; returns the last positions."""
        view, normalizer = view if isinstance(view, NormalisedSteps) else (view, None)
        if not isinstance(view, NStep):
            remedy = 'Pass replay_buffer_kwargs={"next_obs": "shared"}.'
            raise SchemaError(explain(type(view).__name__, "a chain of observations", 'next_obs="stored"', remedy))
        ahead = np.arange(view.n)
        steps, env = (time[:, None] + ahead) % self.size, envs[:, None]
        rewards = self.arrays["rewards"][steps, env]
        if normalizer is not None:
            rewards = normalizer.normalize_reward(rewards)
        newest = (self.written - 1) % self.size
        ended = (self._dones[steps, env] != 0) | (self._timeouts[steps, env] != 0) | (steps == newest)
        ended[:, -1] = True
        last = ended.argmax(1)
        weight = np.where(ahead <= last[:, None], view.gamma**ahead, 0)
        batch.set("reward", torch.from_numpy((rewards * weight).sum(1).astype(np.float32)))
        batch.set("discount", torch.from_numpy((view.gamma ** (last + 1.0)).astype(np.float32)))
        final = steps[np.arange(len(time)), last]
        after = self.arrays["next_observations"]
        taken = (
            {key: part[final, envs] for key, part in after.items()} if isinstance(after, dict) else after[final, envs]
        )
        batch.set("next_obs", torch_of(taken, _CPU))
        return final


class NormalisedSteps(tuple[NStep, VecNormalize]):
    """n steps whose rewards are normalised, and clipped, one by one before they are summed."""
