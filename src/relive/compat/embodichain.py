"""EmbodiChain's two rollout buffers: steps `[T, N]` (`StepRolloutBuffer`), and one shared TensorDict `[N, T + 1]`.

What is different here, because it matters for learning:

- A truncated step bootstraps. EmbodiChain resets in the same step, so the value stored after an end is that of the next
  episode. `compute_gae` and `next_value` of `transition_view` take the value of the true final observation where the
  rollout has a field "final_value", and else the value of the state that was truncated.
- Only rows that were stored are iterated, every field added to a rollout goes through `transition_view`, and none of
  them outlives `start_rollout`.
- Extras of another shape, and flags or numbers of another kind, are refused instead of left out or cast.
- No global generator is used: `seed=` makes batches repeatable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.functional import pad

from relive.errors import SchemaError, explain
from relive.estimators import gae, group_advantage
from relive.fields.batch import moved
from relive.fields.conversion import device_of
from relive.fields.schema import Field, positive
from relive.kernels.shuffling import shuffled
from relive.randomness import Randomness
from relive.rollout.buffer import RolloutBuffer as _Rollout

__all__ = [
    "RolloutBuffer",
    "StepRolloutBuffer",
    "compute_gae",
    "compute_group_advantage",
    "iterate_minibatches",
    "transition_view",
]

_OURS = {
    "obs": "obs",
    "actions": "action",
    "rewards": "reward",
    "dones": "terminated",
    "values": "value",
    "logprobs": "log_prob",
}


class StepRolloutBuffer:
    """`num_steps` steps of `num_envs` environments, added one by one: EmbodiChain's older `RolloutBuffer`.

    `obs [T, N, obs_dim]`, `actions [T, N, action_dim]`, `rewards`, `dones`, `values` and `logprobs [T, N]` are the
    memory itself. `done` means that the step just taken ended the episode. `core` is the relive buffer underneath.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        obs_dim: int,
        action_dim: int,
        device: torch.device | str,
        *,
        seed: int | None = None,
    ) -> None:
        self.num_steps, self.num_envs = num_steps, num_envs
        self.obs_dim, self.action_dim = obs_dim, action_dim
        self.core = _Rollout(num_steps, num_envs, obs_dim, action_dim, device=device, seed=seed)
        self.device = self.core.device
        memory = self.core.columns
        self.obs, self.actions, self.rewards, self.dones, self.values, self.logprobs = map(memory.get, _OURS.values())
        self._extras: Mapping[str, Any] = {}

    @property
    def step(self) -> int:
        """How many steps are stored. Set it to 0 to start again, or to the number of rows written directly."""
        return self.core.num_stored

    @step.setter
    def step(self, step: int) -> None:
        self.core.take_back(step)

    def add(self, obs: Any, action: Any, reward: Any, done: Any, value: Any, logprob: Any) -> None:
        """Store one step of every environment."""
        if self.core.is_full:
            remedy = "Train on the rollout, then set step = 0."
            raise IndexError(explain("add", f"at most {self.num_steps} steps", self.num_steps + 1, remedy))
        obs, action, reward, done, value, logprob = map(self._here, (obs, action, reward, done, value, logprob))
        never = torch.zeros_like(self.dones[0])
        self.core.add(obs, action, reward, done != 0, never, value=value, log_prob=logprob)

    def _here(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else np.asarray(value)

    def _stored(self, extra: Any) -> Any:
        extra = self._here(extra)
        return extra[: self.step] if extra.ndim else extra

    def set_extras(self, extras: Mapping[str, Any] | None) -> None:
        """Let these tensors `[T, N, …]` join every batch, instead of the ones before."""
        self._extras = extras or {}

    def iterate_minibatches(self, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Every stored step of every environment once, shuffled; the last batch may be shorter."""
        self.core.attach({f"extra.{name}": self._stored(extra) for name, extra in self._extras.items()})
        names = _OURS | {name: f"extra.{name}" for name in self._extras}
        batches = self.core.minibatches(batch_size, fields=names.values())
        return ({theirs: batch[ours] for theirs, ours in names.items()} for batch in batches)


class RolloutBuffer:
    """One rollout as a TensorDict `[N, T + 1]` that collector, environment and algorithm write into.

    It is a view of time-major memory and one object for the buffer's life. The last slot holds the last observation and
    its value; it is zero in the other fields. `core` is the relive buffer underneath.
    """

    def __init__(
        self,
        num_envs: int,
        rollout_len: int,
        obs_dim: int,
        action_dim: int,
        device: torch.device | str,
        critic_obs_dim: int | None = None,
        distribution_param_dim: int | None = None,
    ) -> None:
        self.num_envs, self.rollout_len = num_envs, rollout_len
        self.obs_dim, self.action_dim, self.device = obs_dim, action_dim, device
        self.critic_obs_dim, self.distribution_param_dim = critic_obs_dim, distribution_param_dim
        sizes = {
            "critic_obs": critic_obs_dim,
            "action_mean": distribution_param_dim,
            "action_std": distribution_param_dim,
        }
        extra = {"done": Field((), torch.bool), **{name: size for name, size in sizes.items() if size is not None}}
        self.core = _Rollout(rollout_len, num_envs, obs_dim, action_dim, extra=extra, device=device)
        memory: dict[str, Any] = dict(self.core.lend().items())
        self._shared: dict[str, torch.Tensor] = {"sample_log_prob": memory.pop("log_prob"), **memory}
        self._rollout = TensorDict(dict(self._shared), batch_size=[num_envs, rollout_len + 1], device=device)

    @property
    def buffer(self) -> TensorDict:
        """The shared TensorDict."""
        return self._rollout

    def start_rollout(self) -> TensorDict:
        """The shared TensorDict, ready to be written: without the fields of algorithms, its last slot padding."""
        if self.is_full():
            raise RuntimeError("RolloutBuffer already contains a rollout.")
        for name in set(self._rollout.keys()) - set(self._shared):
            del self._rollout[name]
        self._rollout.update(self._shared)
        for name in set(self._shared) - {"obs", "critic_obs", "value"}:
            self._shared[name][:, -1] = 0
        return self._rollout

    def add(self, rollout: TensorDict) -> None:
        """The shared TensorDict has been written: it may be consumed. Fields that were set anew are copied into it."""
        if rollout is not self._rollout:
            raise ValueError("RolloutBuffer only accepts its shared rollout TensorDict.")
        size = (self.num_envs, self.rollout_len + 1)
        if tuple(rollout.batch_size) != size:
            raise SchemaError(
                explain("rollout", f"batch size {size}", tuple(rollout.batch_size), "Keep its batch size.")
            )
        for name, shared in self._shared.items():
            for kind, expected, got in (
                ("shape", tuple(shared.shape), tuple(rollout[name].shape)),
                ("dtype", shared.dtype, rollout[name].dtype),
            ):
                if got != expected:
                    raise ValueError(f"Rollout field '{name}' {kind} mismatch: expected {expected}, got {got}.")
        for name, shared in self._shared.items():
            if rollout[name] is not shared:
                shared.copy_(rollout[name])
                rollout[name] = shared
        self.core.take_back()

    def get(self, flatten: bool = True) -> TensorDict:
        """Consume the rollout: its transitions `[N · T]`, or the shared TensorDict `[N, T + 1]` for `transition_view`.

        The latter is the memory that the next rollout is written into.
        """
        if not self.is_full():
            raise RuntimeError("RolloutBuffer is empty.")
        self.core.clear()
        return transition_view(self._rollout, flatten=True) if flatten else self._rollout

    def is_full(self) -> bool:
        """Whether a rollout waits to be consumed."""
        return self.core.is_full


def transition_view(rollout: TensorDict, flatten: bool = False) -> TensorDict:
    """The transitions `[N, T]` of a rollout `[N, T + 1]`, or `[N · T]` of them, one environment after the other.

    Every field without its last slot, and "next_value", the value of what a step led to. Fields share the rollout's
    memory unless `flatten`, which copies.
    """
    transitions = rollout[:, :-1]
    transitions["next_value"] = _next_value(rollout)
    return transitions.reshape(-1) if flatten else transitions


def iterate_minibatches(
    rollout: TensorDict,
    batch_size: int,
    device: torch.device | str,
    *,
    seed: int | None = None,
) -> Iterator[TensorDict]:
    """Every row of a flat rollout `[B]` once, shuffled, in batches on `device`; the last one may be shorter."""
    positive("batch_size", batch_size)
    rows = torch.arange(len(rollout), device=rollout["reward"].device)
    order = shuffled(rows, Randomness(seed))
    there = device_of(device)
    return (moved(rollout[part], there) for part in order.split(batch_size))


def compute_gae(rollout: TensorDict, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns `[N, T]` of a rollout `[N, T + 1]`, which gets them as "advantage" and "return".

    See `relive.gae`. A step that is done and not truncated does not bootstrap; the last slot of "value" is that of
    the last observation.
    """
    reward, value = rollout["reward"], rollout["value"]
    if reward.ndim != 2:
        raise SchemaError(explain("reward", "shape [N, T + 1]", tuple(reward.shape), "Pass one reward per step."))
    if value.shape != reward.shape:
        raise SchemaError(
            explain("value", f"shape {tuple(reward.shape)}", tuple(value.shape), "Pass one value per slot.")
        )
    truncated = rollout["truncated"]
    terminated = rollout["terminated"] | (rollout["done"] & ~truncated)
    reward, value, terminated, truncated = (x[:, :-1].T for x in (reward, value, terminated, truncated))
    next_value = _next_value(rollout).T
    advantage, return_ = gae(reward, value, next_value, terminated, truncated, gamma=gamma, lam=gae_lambda)
    return _attach(rollout, "advantage", advantage), _attach(rollout, "return", return_)


def compute_group_advantage(
    rollout: TensorDict,
    gamma: float,
    group_size: int,
    truncate_at_first_done: bool = True,
    eps: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of GRPO, "advantage", "seq_mask" and "seq_return", each `[N, T]` and attached to the rollout.

    See `relive.group_advantage`: neighbouring environments form a group.
    """
    seq_return, seq_mask, advantage = group_advantage(
        rollout["reward"][:, :-1].T,
        rollout["done"][:, :-1].T,
        group_size=group_size,
        gamma=gamma,
        first_episode_only=truncate_at_first_done,
        eps=eps,
    )
    return (
        _attach(rollout, "advantage", advantage),
        _attach(rollout, "seq_mask", seq_mask.to(advantage.dtype)),
        _attach(rollout, "seq_return", seq_return),
    )


def _next_value(rollout: TensorDict) -> torch.Tensor:
    """The value of what each step led to [N, T]: the next slot's, but for truncated steps, after which a reset came."""
    value = rollout["value"]
    of_truncated = rollout["final_value"] if "final_value" in rollout.keys() else value
    return torch.where(rollout["truncated"][:, :-1], of_truncated[:, :-1], value[:, 1:])


def _attach(rollout: TensorDict, name: str, steps: torch.Tensor) -> torch.Tensor:
    """Make `steps` [T, N] a field [N, T + 1] of the rollout, zero in the last slot; returns it without that."""
    rollout[name] = pad(steps, (0, 0, 0, 1)).T
    return rollout[name][:, :-1]
