"""EmbodiChain's rollout as one shared TensorDict `[N, T + 1]`, on relive's core."""

from __future__ import annotations

from functools import partial
from inspect import Signature, signature
from typing import Any

import torch
from tensordict import TensorDict

from relive.compat.embodichain.learning.rl.buffer.utils import transition_view
from relive.compat.pickling import PicklableBuffer
from relive.errors import SchemaError, explain
from relive.rollout.buffer import RolloutBuffer as _Rollout
from relive.schema.fields import Field

__all__ = ["RolloutBuffer"]

_ORIGINAL_NAMES = {"log_prob": "sample_log_prob"}
"""EmbodiChain's name of each field that the core names differently."""
_STATE_FIELDS = ("obs", "critic_obs", "value")
"""Fields whose last slot belongs to the state after the last step; the last slot of other fields is padding."""
_OLDER_ATTRIBUTES = (
    "set_extras", "iterate_minibatches", "step", "num_steps", "obs", "actions", "rewards", "dones", "logprobs",
)  # fmt: skip
"""Attributes that only the older buffer has."""


class RolloutBuffer(PicklableBuffer):
    """One rollout as a TensorDict `[N, T + 1]` that collector, environment and algorithm write into.

    The TensorDict has contiguous fields and stays the same object. The last slot holds the observation after the last
    step and its value; the last slot of other fields is zero.
    """

    def __init__(
        self, num_envs: int, rollout_len: int, obs_dim: int, action_dim: int, device: torch.device | str,
        critic_obs_dim: int | None = None, distribution_param_dim: int | None = None,
    ) -> None:  # fmt: skip
        self.num_envs, self.rollout_len = num_envs, rollout_len
        self.obs_dim, self.action_dim, self.device = obs_dim, action_dim, device
        self.critic_obs_dim, self.distribution_param_dim = critic_obs_dim, distribution_param_dim
        extra: dict[str, Any] = {"done": Field((), torch.bool)}
        if critic_obs_dim is not None:
            extra["critic_obs"] = critic_obs_dim
        if distribution_param_dim is not None:
            extra["action_mean"] = extra["action_std"] = distribution_param_dim
        self._make = partial(_Rollout, rollout_len, num_envs, obs_dim, action_dim, extra=extra)
        self._allocate_memory()
        self._rollout = TensorDict(dict(self._shared_fields), batch_size=[num_envs, rollout_len + 1], device=device)
        self._is_full = False

    def _allocate_memory(self) -> None:
        self._core: _Rollout | None = None
        layout: dict[str, Any] = dict(self._make(device="meta").lend().items())
        self._shared_fields: dict[str, torch.Tensor] = {
            _ORIGINAL_NAMES.get(name, name): torch.zeros(field.shape, dtype=field.dtype, device=self.device)
            for name, field in layout.items()
        }
        self._padding = [shared[:, -1] for name, shared in self._shared_fields.items() if name not in _STATE_FIELDS]
        """The last slot of every field that has no value there and stays zero."""

    __signature__ = Signature(list(signature(__init__).parameters.values())[1:])

    def __new__(cls, *args: Any, **kwargs: Any) -> RolloutBuffer:
        """Refuse `num_steps`, an argument of the older buffer, whose first two arguments are swapped."""
        if "num_steps" in kwargs:
            expected, remedy = "(num_envs, rollout_len, …)", "Import it from agents.rl.buffer, or pass rollout_len."
            raise TypeError(explain("RolloutBuffer", expected, "num_steps, an argument of the older buffer", remedy))
        return super().__new__(cls)

    @property
    def core(self) -> _Rollout:
        """A relive buffer with a copy of the shared memory; it has no steps unless a rollout waits to be read."""
        if self._core is None:
            self._core = self._make(device=self.device)
        memory: dict[str, Any] = dict(self._core.lend().items())
        for name, field in memory.items():
            field.copy_(self._shared_fields[_ORIGINAL_NAMES.get(name, name)])
        if self._is_full:
            self._core.take_back()
        else:
            self._core.clear()
        return self._core

    @property
    def buffer(self) -> TensorDict:
        """The shared TensorDict."""
        return self._rollout

    def start_rollout(self) -> TensorDict:
        """Return the shared TensorDict for a new rollout: without fields of algorithms, and with zeros as padding."""
        if self._is_full:
            raise RuntimeError(
                explain("start_rollout", "an empty buffer", "a rollout that was not read", "Call get().")
            )
        for name in set(self._rollout.keys()) - self._shared_fields.keys():
            del self._rollout[name]
        for name, shared in self._shared_fields.items():
            if self._rollout.get(name, None) is not shared:
                self._rollout[name] = shared
        torch._foreach_zero_(self._padding)
        return self._rollout

    def add(
        self, rollout: TensorDict, action: None = None, reward: None = None, done: None = None, value: None = None,
        logprob: None = None,
    ) -> None:  # fmt: skip
        """Mark the shared TensorDict as written; fields that were replaced by other tensors are copied into its memory.

        The other arguments belong to the older buffer and are refused.
        """
        if any(field is not None for field in (action, reward, done, value, logprob)):
            remedy = "Import RolloutBuffer from agents.rl.buffer, whose sizes are (num_steps, num_envs)."
            raise TypeError(explain("add", "the shared rollout", "the fields of one step", remedy))
        if rollout is not self._rollout:
            got, remedy = "another object", "Write into that one, or copy with its update_()."
            raise ValueError(explain("add", "the TensorDict that start_rollout() returned", got, remedy))
        size = (self.num_envs, self.rollout_len + 1)
        if tuple(rollout.batch_size) != size:
            raise SchemaError(
                explain("rollout", f"batch size {size}", tuple(rollout.batch_size), "Keep its batch size.")
            )
        replaced_fields = [
            (name, shared, rollout[name])
            for name, shared in self._shared_fields.items()
            if rollout.get(name) is not shared
        ]
        for name, shared, tensor in replaced_fields:
            shapes, dtypes = (tuple(shared.shape), tuple(tensor.shape)), (shared.dtype, tensor.dtype)
            for kind, (expected, got) in (("shape", shapes), ("dtype", dtypes)):
                if got != expected:
                    raise ValueError(f"Rollout field '{name}' {kind} mismatch: expected {expected}, got {got}.")
        for name, shared, tensor in replaced_fields:
            shared.copy_(tensor)
            rollout[name] = shared
        self._is_full = True

    def get(self, flatten: bool = True) -> TensorDict:
        """Return the transitions `[N · T]`, or the shared TensorDict `[N, T + 1]`; another rollout may then start.

        The next rollout is written into the memory of the shared TensorDict.
        """
        if not self._is_full:
            raise RuntimeError(explain("get", "a rollout", None, "Write one and call add(rollout)."))
        self._is_full = False
        return transition_view(self._rollout, flatten=True) if flatten else self._rollout

    def is_full(self) -> bool:
        """Whether a rollout is written and `get` has not returned it yet."""
        return self._is_full

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError, with a remedy for attributes of the older buffer."""
        if name in _OLDER_ATTRIBUTES:
            remedy = "Import RolloutBuffer from agents.rl.buffer."
            raise AttributeError(explain("RolloutBuffer", "a name of the newer buffer", name, remedy))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    _derived_attributes = ("_core", "_shared_fields", "_padding")

    def _set_derived_attributes(self) -> None:
        self._allocate_memory()
        for name, shared in self._shared_fields.items():
            if name in self._rollout:
                self._rollout[name] = shared.copy_(self._rollout[name])
