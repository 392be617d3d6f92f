# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""`RolloutBuffer` and `DictRolloutBuffer`: Stable-Baselines3's on-policy buffers.

Stable-Baselines3's `episode_start` means that an episode ended *before* a step; the end of the last step is an argument
of `compute_returns_and_advantage`. Its algorithms add γ V(final observation) to the reward of a truncated step, so
every end counts as a termination here.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import stable_baselines3.common.buffers as sb3
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples

from relive.compat.pickling import PicklableBuffer
from relive.compat.seeding import choose_seed
from relive.compat.stable_baselines3.observations import (
    declare_fields,
    get_step_shapes,
    has_overrides,
    reshape_step,
    to_numpy,
)
from relive.compat.step_rows import compute_advantages_and_returns
from relive.compat.views import WriteThroughDict, copy_into_memory, make_memory_views
from relive.errors import NotReadyError, explain
from relive.rollout.buffer import RolloutBuffer as Core
from relive.schema.fields import Field

_CORE_FIELDS = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "values": "value",
    "log_probs": "log_prob",
}
"""Stable-Baselines3's arrays that are the core's memory."""
_SCORES = {"advantages": "advantage", "returns": "return"}
"""Stable-Baselines3's arrays of computed numbers, and the core's names of them."""


class RolloutBuffer(PicklableBuffer, sb3.RolloutBuffer):
    """`buffer_size` steps of `n_envs` environments, for PPO and A2C; observations of any space, Dict included.

    The arrays (`observations`, `rewards`, …) are the memory `[buffer_size, n_envs, …]`, also after `get`. `pos` and
    `full` can be set after writing rows into the arrays. A subclass with its own `_get_samples` or `get` finds flat
    arrays, as in Stable-Baselines3.
    """

    observations, actions, rewards, values, log_probs = make_memory_views(*_CORE_FIELDS)
    advantages, returns, episode_starts = make_memory_views(*_SCORES, "episode_starts")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
    ) -> None:
        sb3.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.gae_lambda = gae_lambda
        self.gamma = gamma
        self._has_own_batches = has_overrides(self, "_get_samples", "to_torch")
        """Whether a user's class overrides a method of sampling, so that Stable-Baselines3's code makes the batches."""
        self._check_observation_space()
        self._allocate_memory()
        self.reset()

    def _check_observation_space(self) -> None:
        """Raise if this class does not support the observation space."""

    def _allocate_memory(self) -> None:
        self._shapes = get_step_shapes(self.observation_space, self.n_envs)
        self._no_ends = np.zeros(self.n_envs, np.bool_)
        """Flags without an end [n_envs], stored for a step until the next step reveals its ends."""
        self._action_dtype: Any = self.action_space.dtype
        self._core = Core(
            self.buffer_size,
            self.n_envs,
            obs=declare_fields(self.observation_space),
            action=Field(self.action_dim, self._action_dtype),
            seed=choose_seed(),
        )
        memory = self._core.columns
        self._arrays: dict[str, Any] = {name: to_numpy(memory[core_name]) for name, core_name in _CORE_FIELDS.items()}
        for name in ("advantages", "returns", "episode_starts"):
            self._arrays[name] = np.zeros((self.buffer_size, self.n_envs), np.float32)

    def _get_memory(self, name: str) -> Any:
        return vars(self)[name]

    def _set_memory(self, name: str, value: Any) -> None:
        memory = self._arrays[name]
        if isinstance(memory, dict):
            arrays: Any = _ReplaceableArrays(name, memory)
            arrays.clear()
            arrays.update(value)
        else:
            arrays = _write_or_replace(name, memory, value)
        vars(self)[name] = arrays

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return self._core.nbytes + sum(x.nbytes for name, x in self._arrays.items() if name not in _CORE_FIELDS)

    def reset(self) -> None:
        """Remove the stored steps. The arrays become zero, except observations and actions."""
        self._core.clear()
        for name, memory in self._arrays.items():
            if name not in ("observations", "actions"):
                memory.fill(0)
            vars(self)[name] = _ReplaceableArrays(name, memory) if isinstance(memory, dict) else memory
        self.pos, self.full = 0, False
        self.generator_ready = False
        """Whether `get` was called since the last `reset`."""

    _derived_attributes = ("_core",)

    def _set_derived_attributes(self) -> None:
        arrays = self._arrays
        self._allocate_memory()
        for name, saved_array in arrays.items():
            setattr(self, name, saved_array)
        # The restored arrays are not flat, so a `get` of Stable-Baselines3's must flatten them.
        self.generator_ready = False

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        episode_start: np.ndarray,
        value: torch.Tensor,
        log_prob: torch.Tensor,
    ) -> None:
        """Store one step of every environment; `episode_start` is True where an episode begins."""
        n_envs, row = self.n_envs, self.pos
        if self._core.num_stored != row:
            self._core.take_back(row)
        self._core.add(
            reshape_step(self._shapes, obs),
            np.asarray(action, self._action_dtype).reshape(n_envs, self.action_dim),
            np.asarray(reward, np.float32).reshape(n_envs),
            self._no_ends,
            self._no_ends,
            value=value.numpy(force=True).reshape(n_envs),
            log_prob=log_prob.numpy(force=True).reshape(n_envs),
        )
        self._arrays["episode_starts"][row] = episode_start
        self.pos = row + 1
        if self.pos == self.buffer_size:
            self.full = True

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray) -> None:
        """Compute `advantages` and `returns`; `dones` is True where the last step ended its episode."""
        steps, arrays = self.buffer_size if self.full else self.pos, self._arrays
        reward, value = (torch.from_numpy(arrays[name][:steps]) for name in ("rewards", "values"))
        starts_after = [arrays["episode_starts"][1:steps], np.reshape(dones, (1, self.n_envs))]
        ended = torch.from_numpy(np.concatenate(starts_after) != 0)
        last = last_values.detach().reshape(self.n_envs).to(value)
        scores = compute_advantages_and_returns(reward, value, last, ended, gamma=self.gamma, lam=self.gae_lambda)
        for name, score in zip(_SCORES, scores, strict=True):
            arrays[name][:steps] = score.numpy()

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Yield every step once, in random order, in batches of `batch_size`; by default in a single batch."""
        self._require_full()
        if self._has_own_batches:
            yield from super().get(batch_size)
            return
        core = self._core
        if core.num_stored != self.buffer_size:
            core.take_back()
        core.attach(
            {core_name: torch.from_numpy(self._arrays[name]) for name, core_name in self._attached_fields.items()}
        )
        self.generator_ready = True
        size = self.buffer_size * self.n_envs if batch_size is None else batch_size
        device = None if self.device.type == "cpu" else self.device
        fields = ("obs", "action", "value", "log_prob", *self._attached_fields.values())
        for batch in core.minibatches(size, fields=fields, device=device):
            yield self._make_samples([batch[name] for name in fields])

    def _require_full(self) -> None:
        if not self.full:
            remedy = f"Add {self.buffer_size - self.pos} more."
            raise NotReadyError(explain("get", f"{self.buffer_size} steps", self.pos, remedy))

    def _make_samples(self, fields: list[Any]) -> Any:
        """Make the named tuple of a batch from its fields."""
        obs, action, *other_fields = fields
        if self._casts_actions and action.dtype != torch.float32:
            action = action.float()
        if isinstance(obs, torch.Tensor):
            return self._batch_types[0](obs, action, *other_fields)
        return self._batch_types[1](dict(obs.items()), action, *other_fields)

    _attached_fields = _SCORES
    """The core's names of the arrays that are attached to it for batches."""
    _batch_types: tuple[Any, Any] = (RolloutBufferSamples, DictRolloutBufferSamples)
    """Types of batches: with one tensor of observations, and with a dict of tensors."""
    _casts_actions = True
    """Whether this buffer casts the actions of a batch to float32."""


class DictRolloutBuffer(RolloutBuffer, sb3.DictRolloutBuffer):
    """A `RolloutBuffer` for Dict observations only."""

    def _check_observation_space(self) -> None:
        if not isinstance(self.obs_shape, dict):
            # The message keeps Stable-Baselines3's words, because its tests match them.
            where = "DictRolloutBuffer must be used with Dict obs space only"
            raise AssertionError(explain(where, "a Dict space", self.observation_space, "Use RolloutBuffer."))


def _write_or_replace(where: str, memory: np.ndarray | None, value: Any) -> Any:
    """Copy an array into memory of the same shape and return the memory; return an array of another shape unchanged."""
    if memory is None or np.shape(value) != memory.shape:
        return value
    copy_into_memory(where, memory, value)
    return memory


class _ReplaceableArrays(WriteThroughDict):
    """The arrays of a Dict space by key; users' code may replace them by arrays of other shapes."""

    def __init__(self, where: str, memory: dict[str, np.ndarray]) -> None:
        super().__init__(where, memory)
        self._memory = memory

    def __setitem__(self, key: str, value: Any) -> None:
        dict.__setitem__(self, key, _write_or_replace(f"{self._where}.{key}", self._memory.get(key), value))
