"""ApexRL's replay buffer on ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.apexrl.attributes import plain
from relive.compat.apexrl.specs import Spec, batch_size_of, declared, ended, inferred, placed, written
from relive.errors import SchemaError, explain
from relive.fields.schema import Field
from relive.randomness import Randomness

_CRITIC = "critic_observations"
_TRANSITION = (
    "observations", "actions", "rewards", "next_observations", "dones", _CRITIC, f"next_{_CRITIC}"
)  # fmt: skip


class ReplayBuffer:
    """The newest `capacity` transitions under ApexRL's names, drawn uniformly with replacement.

    Transitions come in batches `[B, …]` in any order, or singly without the axis. `seed` makes the draws repeatable;
    ApexRL draws from the global generator, we do not.

    What is different here:
    - Actions keep their dtype: without `action_dtype` the first `add` says what it is, and with an integer one floats
      are refused. (There, int64 is the default and a continuous action of 0.7 is stored as 0, also in the documented
      example.)
    - `observations` and `next_observations` in the same memory are refused: the environment steps in place and has
      overwritten the former.
    - Critic observations that are declared must be given, and those that are not declared are refused. (There, the row
      of an older transition stays, or what is given is dropped.)
    - Nothing is broadcast: a reward of shape (1,) for three transitions is refused.

    >>> buffer = ReplayBuffer(capacity=10, obs_shape=(2,), action_shape=(1,))
    >>> buffer.add(torch.zeros(3, 2), torch.full((3, 1), 0.7), torch.ones(3), torch.ones(3, 2), torch.zeros(3))
    >>> buffer.sample(2)["actions"]
    tensor([[0.7000],
            [0.7000]])
    """

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
        self.capacity = capacity
        self.obs_shape = obs_shape
        self.action_shape = tuple(action_shape)
        self.device = torch.device(device)
        self.obs_dtype = obs_dtype
        self.action_dtype = action_dtype
        """None until the first `add` where it was not given."""
        self.critic_obs_shape = critic_obs_shape
        self.pos = 0
        """Where ApexRL would write next."""
        self.full = False
        self._random = Randomness(seed)
        self.core = None if action_dtype is None else self._made(action_dtype)

    def _made(self, action_dtype: torch.dtype) -> rl.ReplayBuffer:
        obs = {"observations": declared(self.obs_shape, self.obs_dtype)}
        if self.critic_obs_shape is not None:
            obs[_CRITIC] = declared(self.critic_obs_shape, self.obs_dtype)
        action, seed = Field(self.action_shape, action_dtype), self._random.seed()
        return rl.ReplayBuffer(self.capacity, obs, action, device=self.device, next_obs="stored", seed=seed)

    @property
    def size(self) -> int:
        """How many transitions are stored."""
        return 0 if self.core is None else len(self.core)

    def __len__(self) -> int:
        """How many transitions are stored."""
        return self.size

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
        """Store a batch of transitions `[B, …]`, or one without that axis; an empty batch is nothing to do.

        `dones` says where the next observation has no value: pass `terminated`, and the true final observations of
        episodes that were cut off.
        """
        count = batch_size_of(self.obs_shape, observations)
        if count == 0:
            return
        if count is not None and count > self.capacity:
            raise ValueError(f"batch size {count} exceeds replay capacity {self.capacity}")
        dtype = self.action_dtype or inferred(actions, 0, self.action_shape, None).dtype
        core = self._made(dtype) if self.core is None else self.core
        transition = {
            "obs": self._observed("", observations, critic_observations),
            "action": placed(None, actions, self.device),
            "reward": placed(None, rewards, self.device),
            "terminated": ended(dones, self.device),
            "next_obs": self._observed("next_", next_observations, next_critic_observations),
        }
        if count is None:
            core.add(**transition, truncated=False)
        else:
            core.extend({**transition, "truncated": torch.zeros(count, dtype=torch.bool, device=self.device)})
        self.core, self.action_dtype = core, dtype
        end = self.pos + (count or 1)
        self.pos, self.full = end % self.capacity, self.full or end >= self.capacity

    def _observed(self, prefix: str, observations: Any, critic_observations: Any) -> dict[str, Any]:
        observed = {"observations": placed(self.obs_shape, observations, self.device)}
        if self.critic_obs_shape is not None:
            observed[_CRITIC] = placed(self.critic_obs_shape, critic_observations, self.device)
        elif critic_observations is not None:
            remedy = "Make the buffer with critic_obs_shape=."
            got = type(critic_observations).__name__
            raise SchemaError(explain(prefix + _CRITIC, "None without critic_obs_shape", got, remedy))
        return observed

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Transitions drawn uniformly with replacement, in memory of the caller's own."""
        check_sample(batch_size, self.size)
        assert self.core is not None  # there are transitions
        return self._named(self.core.sample(batch_size))

    def _named(self, rows: TensorDict) -> dict[str, Any]:
        """Transitions of the core under ApexRL's names."""
        obs, next_obs = rows["obs"], rows["next_obs"]
        named = {
            "observations": obs["observations"],
            "actions": rows["action"],
            "rewards": rows["reward"],
            "next_observations": next_obs["observations"],
            "dones": rows["terminated"].float(),
        }
        if self.critic_obs_shape is not None:
            named |= {_CRITIC: obs[_CRITIC], f"next_{_CRITIC}": next_obs[_CRITIC]}
        return named

    def clear(self) -> None:
        """Forget every transition."""
        self.pos, self.full = 0, False
        if self.core is not None:
            self.core.clear()

    def state_dict(self) -> dict[str, Any]:
        """The stored transitions as tensors, dicts, dtypes and numbers only, for `torch.load(…, weights_only=True)`.

        The rows are in the order of ApexRL's memory, which `pos` is the end of. A leaf of a specification that has a
        dtype of its own is written as (shape, dtype).
        """
        size, rows = self.size, dict[str, Any]()
        if self.core is not None:
            rows = self._named(self.core[self.core.ids().roll(self.pos)])
        return {
            "capacity": self.capacity,
            **self._specs(),
            "obs_dtype": self.obs_dtype,
            "action_dtype": self.action_dtype,
            "pos": self.pos,
            "full": self.full,
            "size": size,
            **{name: plain(rows.get(name)) for name in _TRANSITION},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what `state_dict` of a buffer of the same layout held; an error leaves the buffer as it was."""
        if state_dict["capacity"] != self.capacity:
            raise ValueError(f"ReplayBuffer capacity mismatch: {state_dict['capacity']} != {self.capacity}")
        for name, own in self._specs().items():
            if written(state_dict.get(name)) != own:
                raise ValueError(f"ReplayBuffer {name} mismatch")
        twin = ReplayBuffer(
            self.capacity, self.obs_shape, self.action_shape, self.device, self.obs_dtype, self.action_dtype,
            self.critic_obs_shape, seed=self._random.seed(),
        )  # fmt: skip
        size = int(state_dict["size"])
        pos = int(state_dict.get("pos", size % self.capacity))
        if size:
            given = {name: state_dict[name] for name in _TRANSITION if state_dict.get(name) is not None}
            oldest_first = torch.arange(size).roll(-pos)
            twin.add(**TensorDict(given, [size])[oldest_first])
        self.core, self.action_dtype = twin.core, twin.action_dtype
        self.pos, self.full = pos, bool(state_dict.get("full", size == self.capacity))

    def _specs(self) -> dict[str, Any]:
        return {name: written(getattr(self, name)) for name in ("obs_shape", "action_shape", "critic_obs_shape")}


def check_capacity(capacity: int) -> None:
    """ApexRL's error for a buffer that holds nothing."""
    if capacity <= 0:
        raise ValueError(f"capacity must be positive, got {capacity}")


def check_sample(batch_size: int, size: int) -> None:
    """ApexRL's errors for a batch that cannot be drawn."""
    if batch_size <= 0:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if size < batch_size:
        raise ValueError(f"cannot sample {batch_size} transitions from buffer of size {size}")
