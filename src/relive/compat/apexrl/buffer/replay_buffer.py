"""ApexRL's replay buffer on relive's core."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.apexrl.buffer.overwritten import OverwrittenObs
from relive.compat.apexrl.buffer.specs import (
    convert_dones,
    declare_action,
    list_leaves,
    to_device,
    to_dicts,
    to_plain_spec,
)
from relive.compat.apexrl.utils.observation import Spec
from relive.compat.pickling import PicklableBuffer, restore_core
from relive.compat.seeding import choose_seed
from relive.compat.views import declare_spec, is_memory_shared, make_memory_views, map_tree
from relive.errors import DataWarning, explain
from relive.schema.checks import check_int, check_none_without_argument
from relive.schema.fields import Field

_CORE_NAMES = {
    "observations": "obs", "actions": "action", "rewards": "reward", "next_observations": "next_obs", "dones": "dones",
}  # fmt: skip
"""Core's name of each field, in ApexRL's order."""
_CRITIC = {name: name for name in ("critic_observations", "next_critic_observations")}


class ReplayBuffer(PicklableBuffer):
    """The newest `capacity` transitions under ApexRL's names, drawn uniformly with replacement.

    `add` takes batches `[B, …]`, or one transition without the batch axis. Attributes are the memory itself.
    `seed` makes the draws repeatable, and so does `torch.manual_seed`; no global generator is used.

    Differences from ApexRL:
    - Actions keep their dtype: without `action_dtype` the first `add` declares it; an integer dtype refuses floats.
      (ApexRL: int64 is the default, so a continuous action of 0.7 is stored as 0, also in the documented example.)
    - A `DataWarning` reports once that the environment overwrites `observations` with `next_observations`.
    - Declared critic observations are required, and undeclared ones are refused. (ApexRL: missing ones keep the row of
      an older transition, and undeclared ones are dropped.)
    - Nothing is broadcast: a reward of shape (1,) for three transitions is refused.

    >>> buffer = ReplayBuffer(capacity=10, obs_shape=(2,), action_shape=(1,))
    >>> buffer.add(torch.zeros(3, 2), torch.full((3, 1), 0.7), torch.ones(3), torch.ones(3, 2), torch.zeros(3))
    >>> buffer.sample(2)["actions"]
    tensor([[0.7000],
            [0.7000]])
    """

    observations, actions, rewards, next_observations, dones = make_memory_views(*_CORE_NAMES.values())
    critic_observations, next_critic_observations = make_memory_views(*_CRITIC)

    def __init__(
        self, capacity: int, obs_shape: Spec, action_shape: tuple[int, ...] = (), device: torch.device | str = "cpu",
        obs_dtype: torch.dtype = torch.float32, action_dtype: torch.dtype | None = None,
        critic_obs_shape: Spec | None = None, *, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.capacity, self.device = capacity, torch.device(device)
        self.obs_shape, self.obs_dtype, self.critic_obs_shape = obs_shape, obs_dtype, critic_obs_shape
        self.action_shape = tuple(action_shape)
        self.action_dtype = action_dtype
        """The dtype of actions; None until the first `add` if it was not declared."""
        self._num_written = 0
        """Number of transitions written since the last `clear`."""
        self._names = _CORE_NAMES if critic_obs_shape is None else _CORE_NAMES | _CRITIC
        self._seed = choose_seed(seed)
        self._overwritten_obs = OverwrittenObs()
        self._zero_flags: dict[int | None, torch.Tensor] = {}
        """`truncated` of the latest batch, by its size; None is a single transition."""
        self._core = self._make_core(action_dtype or torch.float32)
        first_field: Any = declare_spec(obs_shape, obs_dtype)
        while isinstance(first_field, Mapping):
            first_field = next(iter(first_field.values()))
        self._num_obs_axes = len(first_field.shape)
        """Number of axes of the first tensor of an observation."""

    def _replace_core(self, action_dtype: torch.dtype) -> None:
        """Replace the core by an empty one; the old core is freed first, since two may not fit into memory."""
        del self._core
        self._core = self._make_core(action_dtype)

    def _make_core(self, action_dtype: torch.dtype) -> rl.ReplayBuffer:
        critic = {} if self.critic_obs_shape is None else _CRITIC
        fields = declare_spec(self.obs_shape, self.obs_dtype), Field(self.action_shape, action_dtype)
        extra = {"dones": (), **{name: declare_spec(self.critic_obs_shape, self.obs_dtype) for name in critic}}
        settings: dict[str, Any] = {"device": self.device, "next_obs": "stored", "seed": self._seed}
        return rl.ReplayBuffer(self.capacity, *fields, extra=extra, **settings)

    @property
    def core(self) -> rl.ReplayBuffer:
        """The relive buffer underneath."""
        return self._core

    def _get_memory(self, field: str) -> Any:
        """Return the memory `[capacity, …]` of a field of the core; None for an undeclared field."""
        return self._core.columns.reshape(-1).get(field, None)

    @property
    def pos(self) -> int:
        """Number of the row that is written next."""
        return self._num_written % self.capacity

    @property
    def full(self) -> bool:
        """Whether every row is written."""
        return self._num_written >= self.capacity

    @property
    def size(self) -> int:
        """Number of stored transitions."""
        return min(self._num_written, self.capacity)

    def __len__(self) -> int:
        """Number of stored transitions."""
        return self.size

    def add(
        self, observations: Any, actions: Any, rewards: Any, next_observations: Any, dones: Any,
        critic_observations: Any = None, next_critic_observations: Any = None,
    ) -> None:  # fmt: skip
        """Store a batch of transitions `[B, …]`, or one transition without a batch axis; an empty batch stores nothing.

        `dones` marks transitions whose next observation has no value: pass `terminated`. For truncated episodes pass
        the true final observation.
        """
        obs = to_device(observations, self.device)
        obs_leaves = list_leaves("observations", self.obs_shape, obs)
        shape = np.shape(obs_leaves[0])
        count = shape[0] if len(shape) > self._num_obs_axes else None
        if count == 0:
            return
        if count is not None and count > self.capacity:
            raise ValueError(f"batch size {count} exceeds replay capacity {self.capacity}")
        dtype = self.action_dtype or declare_action(actions, 0, self.action_shape, None).dtype
        if not self._num_written and self._core.columns["action"].dtype != dtype:
            self._replace_core(dtype)
        critic = self._collect_critic_fields(critic_observations, next_critic_observations)
        next_obs = self._copy_if_shared(obs_leaves, to_device(next_observations, self.device))
        rewards, ended = to_device(rewards, self.device), convert_dones("dones", dones, self.device)
        if count == 1:
            rewards, ended = _as_batch_of_one(rewards), _as_batch_of_one(ended)
        step = {
            "obs": obs, "action": to_device(actions, self.device), "reward": rewards, "terminated": ended.bool(),
            "truncated": self._make_truncated_flags(count), "next_obs": next_obs, "dones": ended, **critic,
        }  # fmt: skip
        if count is None:
            self._core.add(**step)
        else:
            self._core.extend(step)
        self.action_dtype = dtype
        self._num_written += count or 1

    def _make_truncated_flags(self, count: int | None) -> torch.Tensor:
        if count not in self._zero_flags:
            shape = () if count is None else (count,)
            self._zero_flags = {count: torch.zeros(shape, dtype=torch.bool, device=self.device)}
        return self._zero_flags[count]

    def _collect_critic_fields(self, *observations: Any) -> dict[str, Any]:
        critic = dict(zip(_CRITIC, observations, strict=True))
        if self.critic_obs_shape is not None:
            return {name: to_device(value, self.device) for name, value in critic.items()}
        for name, value in critic.items():
            check_none_without_argument(name, value, "critic_obs_shape")
        return {}

    def _copy_if_shared(self, obs_leaves: list[Any], next_obs: Any) -> Any:
        """Copy next observations that share memory with the observations; warn if they have overwritten them."""
        pairs = list(zip(obs_leaves, list_leaves("next_observations", self.obs_shape, next_obs), strict=True))
        if self._overwritten_obs.is_first_overwrite(*pairs[0]):
            remedy = "The environment reuses its memory: clone observations before the step."
            got = "observations that the next observations have overwritten"
            warnings.warn(explain("observations", "those before the step", got, remedy), DataWarning, stacklevel=3)
        if not any(is_memory_shared(*pair) for pair in pairs):
            return next_obs
        return map_tree(lambda x: x.clone() if isinstance(x, torch.Tensor) else x.copy(), next_obs)

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw transitions uniformly with replacement, as copies."""
        check_sample_size(batch_size, len(self))
        batch = self._core.sample(batch_size)
        return {name: batch[core_name] for name, core_name in self._names.items()}

    def clear(self) -> None:
        """Remove every transition."""
        self._num_written = 0
        # The new core starts at row 0 again, so it gets a new seed, which makes its draws differ from earlier draws.
        self._seed += 1
        self._replace_core(self._core.columns["action"].dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions as tensors, dicts, dtypes and numbers, for `torch.load(…, weights_only=True)`.

        The rows are in memory order: row `pos` is overwritten next. A `TensorLeafSpec` is saved as
        (shape, dtype).
        """
        numbers = {name: getattr(self, name) for name in ("obs_dtype", "action_dtype", "pos", "full", "size")}
        rows = dict.fromkeys((*_CORE_NAMES, *_CRITIC))
        if self._num_written:
            memory = {name: self._get_memory(core_name) for name, core_name in self._names.items()}
            rows |= {name: to_dicts(tensor[: self.size].clone()) for name, tensor in memory.items()}
        return {"capacity": self.capacity, **self._list_specs(), **numbers, **rows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of a buffer with this layout; an error leaves the buffer unchanged."""
        if state_dict["capacity"] != self.capacity:
            remedy = "Load it into a buffer of the same capacity."
            raise ValueError(explain("capacity", f"{self.capacity}, this buffer's", state_dict["capacity"], remedy))
        for name, spec in self._list_specs().items():
            if to_plain_spec(state_dict.get(name)) != spec:
                raise ValueError(f"ReplayBuffer {name} mismatch")
        size = int(state_dict.get("size", 0))
        pos = int(state_dict.get("pos", size % self.capacity))
        if not size:
            self.clear()
            return
        rows = {name: state_dict[name] for name in (*_CORE_NAMES, *_CRITIC) if state_dict.get(name) is not None}
        dtype = self.action_dtype or declare_action(rows["actions"], 0, self.action_shape, None).dtype
        self._core, self.action_dtype = self._fill_core(self._make_core(dtype), rows, pos), dtype
        self._num_written = self.capacity + pos if state_dict.get("full", size == self.capacity) else size

    def _fill_core(self, core: rl.ReplayBuffer, rows: Mapping[str, Any], pos: int) -> rl.ReplayBuffer:
        """Fill a new core with `rows`, which are in memory order; row `pos` is the oldest one of a full buffer."""
        fields = {_CORE_NAMES.get(name, name): tensor for name, tensor in rows.items()}
        block = TensorDict(fields, [len(rows["rewards"])]).to(self.device)
        block["dones"] = convert_dones("dones", block["dones"], self.device)
        block["terminated"] = block["dones"].bool()
        block["truncated"] = torch.zeros_like(block["terminated"])
        parts = (block,) if len(block) < self.capacity or not pos else (block[:pos], block[pos:], block[:pos])
        # Rows before `pos` are written first and again last, so that the next row of a full core is `pos`.
        for part in parts:
            core.extend(part.clone())
        return core

    def _list_specs(self) -> dict[str, Any]:
        return {name: to_plain_spec(getattr(self, name)) for name in ("obs_shape", "action_shape", "critic_obs_shape")}

    def _set_derived_attributes(self) -> None:
        self._core = restore_core(self._make_core(self.action_dtype or torch.float32), self._core)


def _as_batch_of_one(value: Any) -> Any:
    """Reshape a single number to `[1]`."""
    return value.reshape(1) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def check_sample_size(batch_size: int, num_rows: int) -> None:
    """Raise ApexRL's errors for a batch size below 1 or above `num_rows`, the number of stored rows."""
    if check_int("batch_size", batch_size, min=1, remedy="Pass how many transitions to draw.") > num_rows:
        raise ValueError(explain("batch_size", f"at most {num_rows}, which are stored", batch_size, "Add more first."))
