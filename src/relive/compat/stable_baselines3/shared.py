# pyright: reportMissingImports=false
"""Rows in a chain: every observation is stored once, and where an episode ends its last one takes a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from relive.compat.stable_baselines3.arrays import Arrays, Gathered
from relive.compat.stable_baselines3.stored import NormalisedSteps
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer as Core
from relive.replay.views import NStep, Sequence

_FIELDS = {
    "observations": "obs",
    "next_observations": "next_obs",
    "actions": "action",
    "rewards": "reward",
    "timeouts": "truncated",
}
_WRITABLE = ("actions", "rewards")


class SharedRows:
    """Up to `size` steps of `n_envs` environments; the arrays are copies in the order of positions.

    What is no longer stored is zero in them. Rewards and actions can be written; a mark in `dones` at the newest step
    ends its episode; everything else is refused.
    """

    def __init__(self, size: int, n_envs: int, **settings: Any) -> None:
        self.size, self.n_envs = size, n_envs
        self.core = Core(size * n_envs, num_envs=n_envs, **settings)
        self._never = np.zeros(n_envs, np.bool_)
        self.written = 0
        """How many steps of every environment were added."""

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return self.core.nbytes

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, timeout: Any, beside: dict[str, Any]
    ) -> None:
        """Store one step of every environment."""
        terminated, truncated = done, self._never
        if timeout is not None:
            truncated, terminated = timeout, done & ~timeout
        self.core.add(obs, action, reward, terminated, truncated, next_obs, **beside)
        self.written += 1

    def size_at(self, pos: int, is_full: bool) -> int:
        """How many positions before `pos` have a step of every environment."""
        stored, newer = int(self.core.storage.ring.count.min()), (self.written - pos) % self.size
        return max(stored - newer, 0)

    def state(self) -> dict[str, Any]:
        """What to save beside the core."""
        return {"written": self.written}

    def load(self, state: dict[str, Any]) -> None:
        """Go on with what was saved."""
        self.written = state["written"]

    # Reading

    def sample(self, batch_size: int, view: Any) -> TensorDict:
        """Random rows."""
        if isinstance(view, NormalisedSteps):
            return self._normalised(self.core.sample(batch_size, view[0]), *view)
        return self.core.sample(batch_size, view)

    def read(self, positions: np.ndarray, envs: np.ndarray, view: Any) -> TensorDict:
        """The rows at these positions of these environments."""
        index, stored = self._index_at(torch.as_tensor(positions, device="cpu"), torch.as_tensor(envs, device="cpu"))
        if not stored.all():
            gone = int(positions[int((~stored).nonzero()[0])])
            remedy = "Pass positions of stored transitions; the last observation of an episode takes a position too."
            raise IndexError(explain("batch_inds", "stored positions", gone, remedy))
        if isinstance(view, NormalisedSteps):
            return self._normalised(self.core.read(index, view[0]), *view)
        return self.core.read(index, view)

    def _normalised(self, batch: TensorDict, view: NStep, normalizer: VecNormalize) -> TensorDict:
        """A batch of n steps with the sum of rewards that are normalised one by one."""
        steps = self.core.read(batch["index"], Sequence(view.n))
        rewards = torch.from_numpy(normalizer.normalize_reward(steps["reward"].numpy()))
        others = steps["is_first"].clone()
        others[:, 0] = False
        going = steps["mask"] & (others.cumsum(1) == 0)
        discount = view.gamma ** torch.arange(view.n, device="cpu")
        batch.set("reward", (rewards * discount * going).sum(1).float())
        return batch

    def _index_at(self, positions: torch.Tensor, envs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The core's ids of the steps at positions, and which of them are stored."""
        index = self.core.ids()
        index = index[(index % self.n_envs).argsort(stable=True)]  # by environment, then time
        count = torch.bincount(index % self.n_envs, minlength=self.n_envs)
        age = (self.written - 1 - positions) % self.size
        stored = age < count[envs]
        place = count.cumsum(0)[envs] - 1 - age
        return index[place[stored]] if len(index) else index, stored

    def _all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of all positions [size · n_envs]."""
        positions, envs = torch.cartesian_prod(
            torch.arange(self.size, device="cpu"), torch.arange(self.n_envs, device="cpu")
        ).unbind(1)
        return self._index_at(positions, envs)

    # The arrays

    def array(self, name: str) -> Any:
        """A copy of a field at all positions, or a dict of copies."""
        index, stored = self._all()
        rows = self.core.read(index)
        if name == "dones":
            field: Any = rows["terminated"] | rows["truncated"]
        else:
            field = rows[_FIELDS[name]]
        if isinstance(field, torch.Tensor):
            return self._placed(name, field, stored)
        return Arrays({key: self._placed(name, leaf, stored) for key, leaf in field.items()})

    def put_newest(self, observations: Gathered) -> None:
        """Put the newest next observations where users of `optimize_memory_usage` read them: one position on."""
        if self.written:
            envs = torch.arange(self.n_envs, device="cpu")
            index, _ = self._index_at(torch.full_like(envs, self.written - 1), envs)
            observations.copied[self.written % self.size] = self.core.read(index)["next_obs"].numpy()

    def _placed(self, name: str, leaf: torch.Tensor, stored: torch.Tensor) -> Gathered:
        leaf = leaf.float() if leaf.dtype == torch.bool else leaf
        everything = leaf.new_zeros((len(stored), *leaf.shape[1:]))
        everything[stored] = leaf
        array = everything.view(self.size, self.n_envs, *leaf.shape[1:]).numpy()
        return Gathered.of(array, lambda key, value: self._write(name, array, key, value))

    def _write(self, name: str, array: np.ndarray, key: Any, value: np.ndarray) -> None:
        """Store what is written to an array, or raise."""
        new = array.copy()
        new[key] = value
        changed = (new != array).reshape(self.size, self.n_envs, -1).any(2)
        if not changed.any():
            return
        if name in ("dones", "timeouts"):
            self._mark(name, key, changed, new)
        elif name in _WRITABLE:
            self._overwrite(name, new, changed)
        else:
            remedy = 'Add steps with other observations, or pass replay_buffer_kwargs={"next_obs": "stored"}.'
            raise SchemaError(
                explain(name, "no writing, since neighbouring steps share observations", repr(key), remedy)
            )

    def _overwrite(self, name: str, new: np.ndarray, changed: np.ndarray) -> None:
        index, stored = self._all()
        lost = torch.from_numpy(changed.reshape(-1)) & ~stored
        if lost.any():
            position = int(lost.nonzero()[0]) // self.n_envs
            raise IndexError(explain(name, "stored positions", position, "Write to steps that are still stored."))
        memory: Any = self.core.columns[_FIELDS[name]]
        row, env = index // self.n_envs, index % self.n_envs
        values = torch.from_numpy(new.reshape(len(stored), *memory.shape[2:]))[stored]
        memory[row % len(memory), env] = values

    def _mark(self, name: str, key: Any, changed: np.ndarray, new: np.ndarray) -> None:
        newest = (self.written - 1) % self.size
        envs = changed[newest].nonzero()[0]
        if changed.sum() > len(envs) or not new[newest, envs].all():
            remedy = "Mark only the newest step: older steps have been sampled already."
            raise SchemaError(explain(name, f"a mark at the newest position {newest}", repr(key), remedy))
        self.cut(envs)

    def cut(self, envs: np.ndarray) -> None:
        """The newest steps of these environments end their episodes, as a time limit does."""
        newest = np.full(len(envs), (self.written - 1) % self.size)
        index, _ = self._index_at(torch.from_numpy(newest), torch.from_numpy(envs))
        memory: Any = self.core.columns["truncated"]
        memory[index // self.n_envs % len(memory), index % self.n_envs] = True
        self.core.cut(envs)
