# pyright: reportMissingImports=false
"""The rows of Stable-Baselines3's replay buffers, with stored or with shared next observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from relive.compat.stable_baselines3.observations import to_numpy, to_tensors
from relive.compat.views import map_tree
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer as Core
from relive.replay.views import NStep, Sequence

_CORE_NAMES = {"observations": "obs", "next_observations": "next_obs", "actions": "action", "rewards": "reward"}
_WRITABLE_ARRAYS = ("actions", "rewards")
_CPU = torch.device("cpu")


class _Rows:
    """Base class of rows: the newest `size` steps of `n_envs` environments, at positions that are written in turn."""

    _next_obs: Any
    """The core's argument `next_obs`."""
    arrays_outside_core: tuple[str, ...] = ()
    """Names of the arrays whose memory is not the core's."""

    def __init__(self, size: int, n_envs: int, **settings: Any) -> None:
        self.size, self.n_envs = size, n_envs
        self.core = Core(size * n_envs, num_envs=n_envs, next_obs=self._next_obs, **settings)
        self._no_flags = np.zeros(n_envs, np.bool_)
        self.num_written = 0
        """Number of steps that were ever added per environment."""

    @property
    def newest_pos(self) -> int:
        """Position of the newest step."""
        return (self.num_written - 1) % self.size


class StoredRows(_Rows):
    """Steps that store their next observations; the arrays are the memory itself."""

    _next_obs = "stored"
    arrays_outside_core = ("dones", "timeouts")

    def __init__(self, size: int, n_envs: int, **settings: Any) -> None:
        super().__init__(size, n_envs, **settings)
        columns = self.core.columns
        self._arrays: dict[str, Any] = {name: to_numpy(columns[core_name]) for name, core_name in _CORE_NAMES.items()}
        self._dones, self._timeouts = (np.zeros((size, n_envs), np.float32) for _ in range(2))
        self._arrays |= {"dones": self._dones, "timeouts": self._timeouts}
        self._no_timeouts = np.zeros(n_envs, np.float32)

    def get_array(self, name: str) -> Any:
        """Return the array of a field, or a dict of arrays."""
        return self._arrays[name]

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, timeout: Any, extra: dict[str, Any]
    ) -> None:
        """Store one step of every environment at the next position."""
        pos = self.num_written % self.size
        self.core.add(obs, action, reward, self._no_flags, self._no_flags, next_obs, **extra)
        self._dones[pos] = done
        self._timeouts[pos] = self._no_timeouts if timeout is None else timeout
        self.num_written += 1

    def count_steps(self, pos: int, is_full: bool) -> int:
        """Count the positions before `pos` with a step of every environment."""
        return self.size if is_full else pos

    def sample(self, batch_size: int, view: Any, normalizer: VecNormalize | None) -> TensorDict:
        """Draw rows and read them with a view; a normalizer is applied to rewards before their sum."""
        return self._complete_batch(self.core.sample(batch_size), view, normalizer)

    def read(self, positions: np.ndarray, envs: np.ndarray, view: Any, normalizer: VecNormalize | None) -> TensorDict:
        """Read the rows at these positions of these environments."""
        newest = self.num_written - 1
        rows = newest - (newest - positions) % self.size
        if (rows < 0).any():
            remedy = "Pass positions of stored transitions."
            raise IndexError(explain("batch_inds", "stored positions", int(positions[rows < 0][0]), remedy))
        return self._complete_batch(self.core.read(torch.from_numpy(rows * self.n_envs + envs)), view, normalizer)

    def cut_episodes(self, envs: np.ndarray) -> None:
        """Truncate the episodes of these environments at their newest steps."""
        self._dones[self.newest_pos, envs] = self._timeouts[self.newest_pos, envs] = 1

    def _complete_batch(self, batch: TensorDict, view: Any, normalizer: VecNormalize | None) -> TensorDict:
        """Set "terminated" of a batch, and for n steps also "reward", "discount" and "next_obs"."""
        rows, envs = np.divmod(batch["index"].numpy(), self.n_envs)
        last_steps = rows % self.size, envs
        if isinstance(view, NStep):
            offsets = np.arange(view.n)
            steps = (rows[:, None] + offsets) % self.size, envs[:, None]
            rewards = self._arrays["rewards"][steps]
            if normalizer is not None:
                rewards = normalizer.normalize_reward(rewards)
            is_last = (self._dones[steps] != 0) | (self._timeouts[steps] != 0) | (steps[0] == self.newest_pos)
            is_last[:, -1] = True
            last = is_last.argmax(1)
            weight = np.where(offsets <= last[:, None], view.gamma**offsets, 0)
            batch.set("reward", torch.from_numpy((rewards * weight).sum(1).astype(np.float32)))
            batch.set("discount", torch.from_numpy((view.gamma ** (last + 1.0)).astype(np.float32)))
            last_steps = (rows + last) % self.size, envs
            next_obs = map_tree(lambda array: array[last_steps], self._arrays["next_observations"])
            batch.set("next_obs", to_tensors(next_obs, _CPU))
        return batch.set("terminated", torch.from_numpy(self._dones[last_steps] * (1 - self._timeouts[last_steps])))


class SharedRows(_Rows):
    """Steps that share observations: each is stored once, and the last observation of an episode takes an extra row.

    The arrays are copies in the order of positions, zero where a step is no longer stored. Rewards and actions can be
    written; a 1 in `dones` at the newest step ends its episode; other writes are refused.
    """

    _next_obs = "shared"

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, timeout: Any, extra: dict[str, Any]
    ) -> None:
        """Store one step of every environment."""
        terminated, truncated = done, self._no_flags
        if timeout is not None:
            truncated, terminated = timeout, done & ~timeout
        self.core.add(obs, action, reward, terminated, truncated, next_obs, **extra)
        self.num_written += 1

    def count_steps(self, pos: int, is_full: bool) -> int:
        """Count the positions before `pos` with a step of every environment."""
        num_stored, newer = int(self.core.storage.ring.count.min()), (self.num_written - pos) % self.size
        return max(num_stored - newer, 0)

    def sample(self, batch_size: int, view: Any, normalizer: VecNormalize | None) -> TensorDict:
        """Draw rows and read them with a view; a normalizer is applied to rewards before their sum."""
        batch = self.core.sample(batch_size, view)
        return batch if normalizer is None else self._normalize_rewards(batch, view, normalizer)

    def read(self, positions: np.ndarray, envs: np.ndarray, view: Any, normalizer: VecNormalize | None) -> TensorDict:
        """Read the rows at these positions of these environments."""
        index, is_stored = self._find_ids(torch.as_tensor(positions, device="cpu"), torch.as_tensor(envs, device="cpu"))
        if not is_stored.all():
            lost_position = int(positions[int((~is_stored).nonzero()[0])])
            remedy = "Pass positions of stored transitions; the last observation of an episode takes a position too."
            raise IndexError(explain("batch_inds", "stored positions", lost_position, remedy))
        batch = self.core.read(index, view)
        return batch if normalizer is None else self._normalize_rewards(batch, view, normalizer)

    def _normalize_rewards(self, batch: TensorDict, view: NStep, normalizer: VecNormalize) -> TensorDict:
        """Replace the reward of an n-step batch by the sum of normalised rewards."""
        steps = self.core.read(batch["index"], Sequence(view.n))
        rewards = torch.from_numpy(normalizer.normalize_reward(steps["reward"].numpy()))
        starts = steps["is_first"].clone()
        starts[:, 0] = False
        is_same_episode = steps["mask"] & (starts.cumsum(1) == 0)
        discount = view.gamma ** torch.arange(view.n, device="cpu")
        batch.set("reward", (rewards * discount * is_same_episode).sum(1).float())
        return batch

    def _find_ids(self, positions: torch.Tensor, envs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the core's ids of the steps at these positions, and a mask of positions whose step is stored."""
        index = self.core.ids()
        # Ids are sorted by environment, then time, so that an age gives the place of an id.
        index = index[(index % self.n_envs).argsort(stable=True)]
        count = torch.bincount(index % self.n_envs, minlength=self.n_envs)
        age = (self.num_written - 1 - positions) % self.size
        is_stored = age < count[envs]
        number = count.cumsum(0)[envs] - 1 - age
        return index[number[is_stored]] if len(index) else index, is_stored

    def _find_all_ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the core's ids of all stored steps by position, and a mask of their positions [size · n_envs]."""
        flat_positions = torch.arange(self.size * self.n_envs, device="cpu")
        return self._find_ids(flat_positions // self.n_envs, flat_positions % self.n_envs)

    def get_array(self, name: str) -> Any:
        """Return a copy of a field at all positions; a dict of copies for Dict observations."""
        index, is_stored = self._find_all_ids()
        rows = self.core.read(index)
        if name == "dones":
            field: Any = rows["terminated"] | rows["truncated"]
        else:
            field = rows["truncated" if name == "timeouts" else _CORE_NAMES[name]]
        return map_tree(lambda leaf: self._gather_array(name, leaf, is_stored), field)

    def write_newest_observations(self, observations: GatheredArray) -> None:
        """Copy the newest next observations to the next position, where `optimize_memory_usage` reads them."""
        if self.num_written:
            envs = torch.arange(self.n_envs, device="cpu")
            index, _ = self._find_ids(torch.full_like(envs, self.num_written - 1), envs)
            observations.plain_array[self.num_written % self.size] = self.core.read(index)["next_obs"].numpy()

    def _gather_array(self, name: str, leaf: torch.Tensor, is_stored: torch.Tensor) -> GatheredArray:
        leaf = leaf.float() if leaf.dtype == torch.bool else leaf
        all_rows = leaf.new_zeros((len(is_stored), *leaf.shape[1:]))
        all_rows[is_stored] = leaf
        array = all_rows.view(self.size, self.n_envs, *leaf.shape[1:]).numpy()
        return GatheredArray.wrap(array, lambda key, value: self._store_write(name, array, key, value))

    def _store_write(self, name: str, array: np.ndarray, key: Any, value: np.ndarray) -> None:
        """Store values that a user wrote to an array, or raise."""
        new_array = array.copy()
        new_array[key] = value
        is_changed = (new_array != array).reshape(self.size, self.n_envs, -1).any(2)
        if not is_changed.any():
            return
        if name in ("dones", "timeouts"):
            envs = is_changed[self.newest_pos].nonzero()[0]
            if is_changed.sum() > len(envs) or not new_array[self.newest_pos, envs].all():
                remedy = "Mark only the newest step: older steps have been sampled already."
                raise SchemaError(explain(name, f"a mark at the newest position {self.newest_pos}", repr(key), remedy))
            self.cut_episodes(envs)
            return
        if name not in _WRITABLE_ARRAYS:
            remedy = 'Add steps with other observations, or pass replay_buffer_kwargs={"next_obs": "stored"}.'
            raise SchemaError(
                explain(name, "no writing, since neighbouring steps share observations", repr(key), remedy)
            )
        index, is_stored = self._find_all_ids()
        is_lost = torch.from_numpy(is_changed.reshape(-1)) & ~is_stored
        if is_lost.any():
            position = int(is_lost.nonzero()[0]) // self.n_envs
            raise IndexError(explain(name, "stored positions", position, "Write to steps that are still stored."))
        rows = torch.from_numpy(new_array.reshape(len(is_stored), *new_array.shape[2:]))[is_stored]
        self._write_field(_CORE_NAMES[name], index, rows)

    def _write_field(self, field: str, index: torch.Tensor, values: Any) -> None:
        """Write a field of the rows with these ids."""
        memory: Any = self.core.columns[field]
        memory[index // self.n_envs % len(memory), index % self.n_envs] = values

    def cut_episodes(self, envs: np.ndarray) -> None:
        """Truncate the episodes of these environments at their newest steps."""
        newest = np.full(len(envs), self.newest_pos)
        index, _ = self._find_ids(torch.from_numpy(newest), torch.from_numpy(envs))
        self._write_field("truncated", index, True)
        self.core.cut(envs)


class GatheredArray(np.ndarray):
    """A copy of rows `[buffer_size, n_envs, …]`; the buffer stores what is written to the copy or to its slices."""

    write: Callable[[Any, Any], None]
    """Function that stores a value in the buffer, called as `write(key, value)` for every write; it may raise."""
    plain_array: np.ndarray
    """The memory of the rows as a plain, writable array."""

    @staticmethod
    def wrap(plain_array: np.ndarray, write: Callable[[Any, Any], None]) -> GatheredArray:
        """Make an array over the memory of `plain_array` that calls `write` for every write."""
        array = plain_array.view(GatheredArray)
        array.flags.writeable = False
        array.write, array.plain_array = write, plain_array
        return array

    def __setitem__(self, key: Any, value: Any) -> None:
        if not hasattr(self, "write"):
            # An array derived from a GatheredArray, for example by `reshape`, has no `write` and is read-only.
            raise ValueError("assignment destination is read-only")
        value = np.asarray(value)
        self.write(key, value)
        self.plain_array[key] = value

    def __getitem__(self, key: Any) -> Any:
        if not hasattr(self, "write"):
            return super().__getitem__(key)
        part = self.plain_array[key]
        if not isinstance(part, np.ndarray) or not np.may_share_memory(part, self.plain_array):
            return part
        return GatheredArray.wrap(part, lambda inner_key, value: self._write_to_slice(key, inner_key, value))

    def _write_to_slice(self, key: Any, inner_key: Any, value: np.ndarray) -> None:
        """Write a value at index `inner_key` of the slice at index `key`."""
        part = np.array(self.plain_array[key])
        part[inner_key] = value
        self.write(key, part)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        """Compute with plain arrays; in-place operations such as `rewards += bonus` are writes."""
        result = getattr(ufunc, method)(*map(_as_plain_array, inputs), **options)
        if not out:
            return result
        (target,) = out
        target[...] = result
        return target


def _as_plain_array(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, GatheredArray) else value
