"""ApexRL's replay buffer on our core."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

import relive as rl
from relive.checkpoint.state_dict import load_packed_state, packed_state
from relive.compat.apexrl.buffer.overwritten import Overwritten, share_bytes
from relive.compat.apexrl.buffer.specs import (
    action_field,
    batch_size_of,
    convert_dones,
    leaves_of,
    plain,
    plain_spec,
    to_place,
)
from relive.compat.apexrl.utils.observation import Spec
from relive.compat.pickling import restores
from relive.compat.seeding import experiment_seed
from relive.compat.views import declare, map_tree, memory_views
from relive.errors import DataWarning, explain
from relive.schema.checks import check_int, check_none_without
from relive.schema.fields import Field

_CORE_NAMES = {
    "observations": "obs", "actions": "action", "rewards": "reward", "next_observations": "next_obs", "dones": "dones",
}  # fmt: skip
"""The core's name of each of ApexRL's fields, in ApexRL's order."""
_CRITIC = {name: name for name in ("critic_observations", "next_critic_observations")}


class ReplayBuffer:
    """The newest `capacity` transitions under ApexRL's names, drawn uniformly with replacement.

    `add` takes batches `[B, …]`, or one transition without the batch axis. Attributes are the memory itself.
    `seed` makes the draws repeatable; without it a seeded experiment repeats, and no global generator is touched.

    Differences from ApexRL:
    - Actions keep their dtype: without `action_dtype` the first `add` declares it; an integer dtype refuses floats.
      (ApexRL: int64 is the default, so a continuous action of 0.7 is stored as 0, also in the documented example.)
    - An environment that overwrites `observations` with `next_observations` is reported once by a `DataWarning`.
    - Declared critic observations are required, and undeclared ones are refused. (ApexRL: missing ones keep the row of
      an older transition, and undeclared ones are dropped.)
    - Nothing is broadcast: a reward of shape (1,) for three transitions is refused.

    >>> buffer = ReplayBuffer(capacity=10, obs_shape=(2,), action_shape=(1,))
    >>> buffer.add(torch.zeros(3, 2), torch.full((3, 1), 0.7), torch.ones(3), torch.ones(3, 2), torch.zeros(3))
    >>> buffer.sample(2)["actions"]
    tensor([[0.7000],
            [0.7000]])
    """

    observations, actions, rewards, next_observations, dones = memory_views(*_CORE_NAMES.values())
    critic_observations, next_critic_observations = memory_views(*_CRITIC)

    def __init__(
        self,
        capacity: int,
        obs_shape: Spec,
        action_shape: tuple[int, ...] = (),
        device: torch.device | str = "cpu",
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype | None = None,
        critic_obs_shape: Spec | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        check_capacity(capacity)
        self.capacity, self.device = capacity, torch.device(device)
        self.obs_shape, self.obs_dtype, self.critic_obs_shape = obs_shape, obs_dtype, critic_obs_shape
        self.action_shape = tuple(action_shape)
        self.action_dtype = action_dtype
        """The dtype of actions; None until the first `add` if it was not declared."""
        self._written = 0
        """Number of transitions written since the last `clear`."""
        self._names = _CORE_NAMES if critic_obs_shape is None else _CORE_NAMES | _CRITIC
        self._seed = experiment_seed(seed)
        self._overwritten = Overwritten()
        self._never: dict[int | None, torch.Tensor] = {}
        self._use(None)

    def _use(self, core: rl.ReplayBuffer | None) -> None:
        self._core = core
        self._views: dict[str, Any] | None = None

    def _new_core(self, action_dtype: torch.dtype) -> rl.ReplayBuffer:
        critic = {} if self.critic_obs_shape is None else _CRITIC
        obs = declare(self.obs_shape, self.obs_dtype)
        extra = {"dones": (), **{name: declare(self.critic_obs_shape, self.obs_dtype) for name in critic}}
        settings: dict[str, Any] = {"device": self.device, "next_obs": "stored"}
        self._seed += 1
        action = Field(self.action_shape, action_dtype)
        return rl.ReplayBuffer(self.capacity, obs, action, extra=extra, seed=self._seed, **settings)

    @property
    def core(self) -> rl.ReplayBuffer | None:
        """The relive buffer underneath; None until the first `add` if no `action_dtype` was declared."""
        if self._core is None and self.action_dtype is not None:
            self._use(self._new_core(self.action_dtype))
        return self._core

    def _memory_of(self, field: str) -> Any:
        """The memory of a field of the core `[capacity, …]`; None for an undeclared field."""
        if self._core is None:
            self._use(self._new_core(self.action_dtype or torch.float32))
        if self._views is None and self._core is not None:
            columns = self._core.columns.reshape(-1)
            self._views = {str(name): columns[name] for name in columns.keys()}
        return (self._views or {}).get(field)

    @property
    def pos(self) -> int:
        """The next row to write."""
        return self._written % self.capacity

    @property
    def full(self) -> bool:
        """Whether every row is written."""
        return self._written >= self.capacity

    @property
    def size(self) -> int:
        """Number of stored transitions."""
        return min(self._written, self.capacity)

    def __len__(self) -> int:
        return min(self._written, self.capacity)

    def add(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        next_observations: Any,
        dones: Any,
        critic_observations: Any = None,
        next_critic_observations: Any = None,
    ) -> None:
        """Store a batch of transitions `[B, …]`, or one without that axis; an empty batch stores nothing.

        `dones` marks transitions whose next observation has no value: pass `terminated`. For truncated episodes pass
        the true final observation.
        """
        count = batch_size_of(self.obs_shape, observations)
        if count == 0:
            return
        if count is not None and count > self.capacity:
            raise ValueError(f"batch size {count} exceeds replay capacity {self.capacity}")
        dtype = self.action_dtype or action_field(actions, 0, self.action_shape, None).dtype
        core = self._core
        if core is None or (not self._written and core.columns["action"].dtype != dtype):
            core = self._new_core(dtype)
        extra = self._extra(critic_observations, next_critic_observations)
        obs, next_obs = to_place(observations, self.device), to_place(next_observations, self.device)
        next_obs = self._copy_if_shared(obs, next_obs)
        rewards, flags = to_place(rewards, self.device), convert_dones("dones", dones, self.device)
        if count == 1:
            rewards, flags = _as_batch(rewards), _as_batch(flags)
        extra["dones"] = flags
        row = (obs, to_place(actions, self.device), rewards, flags.bool(), self._no_truncations(count))
        if count is None:
            core.add(*row, next_obs, **extra)
        else:
            names = ("obs", "action", "reward", "terminated", "truncated")
            core.extend({**dict(zip(names, row, strict=True)), "next_obs": next_obs, **extra})
        if core is not self._core:
            self._use(core)
        self.action_dtype = dtype
        self._written += count or 1

    def _no_truncations(self, count: int | None) -> torch.Tensor:
        if count not in self._never:
            shape = () if count is None else (count,)
            self._never = {count: torch.zeros(shape, dtype=torch.bool, device=self.device)}
        return self._never[count]

    def _extra(self, critic: Any, next_critic: Any) -> dict[str, Any]:
        critics = dict(zip(_CRITIC, (critic, next_critic), strict=True))
        if self.critic_obs_shape is not None:
            return {name: to_place(value, self.device) for name, value in critics.items()}
        for name, value in critics.items():
            check_none_without(name, value, "critic_obs_shape")
        return {}

    def _copy_if_shared(self, obs: Any, next_obs: Any) -> Any:
        """Copy next observations that share memory with the observations; warn if they have overwritten them."""
        pairs = [(obs, next_obs)]
        if isinstance(self.obs_shape, Mapping):
            pairs = list(zip(*(leaves_of("obs", self.obs_shape, each) for each in (obs, next_obs)), strict=True))
        if self._overwritten.is_news(*pairs[0]):
            remedy = "The environment reuses its memory: clone observations before the step."
            got = "observations that the next observations have overwritten"
            warnings.warn(explain("observations", "those before the step", got, remedy), DataWarning, stacklevel=3)
        return (
            map_tree(lambda x: x.clone() if isinstance(x, torch.Tensor) else x.copy(), next_obs)
            if any(share_bytes(*pair) for pair in pairs)
            else next_obs
        )

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw transitions uniformly with replacement, as copies."""
        check_sample(batch_size, len(self))
        assert self._core is not None  # check_sample raises without transitions
        batch = self._core.sample(batch_size)
        return {theirs: batch[ours] for theirs, ours in self._names.items()}

    def clear(self) -> None:
        """Remove every transition."""
        self._written = 0
        self._use(None)

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions as tensors, dicts, dtypes and numbers, for `torch.load(…, weights_only=True)`.

        The rows are in memory order: row `pos` is overwritten next. A leaf of a specification with its own dtype
        becomes (shape, dtype).
        """
        numbers = {name: getattr(self, name) for name in ("obs_dtype", "action_dtype", "pos", "full", "size")}
        rows = dict.fromkeys((*_CORE_NAMES, *_CRITIC))
        if self._written:
            rows |= {name: plain(self._memory_of(ours)[: self.size].clone()) for name, ours in self._names.items()}
        return {"capacity": self.capacity, **self._specs(), **numbers, **rows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of a buffer with this layout; an error leaves the buffer unchanged."""
        if state_dict["capacity"] != self.capacity:
            remedy = "Load it into a buffer of the same capacity."
            raise ValueError(explain("capacity", f"{self.capacity}, this buffer's", state_dict["capacity"], remedy))
        for name, own_spec in self._specs().items():
            if plain_spec(state_dict.get(name)) != own_spec:
                raise ValueError(f"ReplayBuffer {name} mismatch")
        size = int(state_dict.get("size", 0))
        pos = int(state_dict.get("pos", size % self.capacity))
        if not size:
            self.clear()
            return
        rows = {name: state_dict[name] for name in (*_CORE_NAMES, *_CRITIC) if state_dict.get(name) is not None}
        dtype = self.action_dtype or action_field(rows["actions"], 0, self.action_shape, None).dtype
        self._use(self._fill(self._new_core(dtype), rows, pos))
        self.action_dtype = dtype
        self._written = self.capacity + pos if state_dict.get("full", size == self.capacity) else size

    def _fill(self, core: rl.ReplayBuffer, rows: Mapping[str, Any], pos: int) -> rl.ReplayBuffer:
        """Fill a core with these rows in memory order; the oldest is at `pos`."""
        block = TensorDict(
            {_CORE_NAMES.get(name, name): tensor for name, tensor in rows.items()}, [len(rows["rewards"])]
        )
        block = block.to(self.device)
        block["dones"] = convert_dones("dones", block["dones"], self.device)
        block["terminated"] = block["dones"].bool()
        block["truncated"] = torch.zeros_like(block["terminated"])
        parts = (block,) if len(block) < self.capacity or not pos else (block[:pos], block[pos:], block[:pos])
        # A full core must end at `pos`: the rows before it are written first, to advance the ring, and again last.
        for part in parts:
            core.extend(part.clone())
        return core

    def _specs(self) -> dict[str, Any]:
        return {name: plain_spec(getattr(self, name)) for name in ("obs_shape", "action_shape", "critic_obs_shape")}

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self).items() if name not in ("_core", "_views")}
        return {**attributes, "_contents": None if self._core is None else packed_state(self._core)}

    @restores
    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        contents = vars(self).pop("_contents")
        core = None if contents is None else self._new_core(self.action_dtype or torch.float32)
        if core is not None and contents is not None:
            load_packed_state(core, contents)
        self._use(core)


def _as_batch(value: Any) -> Any:
    """Reshape the number of a single transition to `[1]`."""
    return value.reshape(1) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def check_capacity(capacity: int) -> None:
    """Raise ApexRL's error for a capacity below 1."""
    check_int("capacity", capacity, min=1, remedy="Pass how many transitions to keep.")


def check_sample(batch_size: int, size: int) -> None:
    """Raise ApexRL's errors for a batch that cannot be drawn."""
    if check_int("batch_size", batch_size, min=1, remedy="Pass how many transitions to draw.") > size:
        raise ValueError(explain("batch_size", f"at most {size}, which are stored", batch_size, "Add more first."))
