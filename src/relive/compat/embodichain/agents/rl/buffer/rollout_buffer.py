"""EmbodiChain's older rollout buffer, filled step by step as `[T, N]`, on relive's core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from relive.compat.seeding import choose_seed, make_generator
from relive.compat.step_rows import StepBuffer, StepRows
from relive.compat.views import as_bools, make_memory_views
from relive.errors import SchemaError, explain
from relive.rollout.buffer import RolloutBuffer as _Rollout
from relive.schema.checks import check_nonempty, check_positive_int

__all__ = ["RolloutBuffer"]

_CORE_NAMES = {
    "obs": "obs", "actions": "action", "rewards": "reward", "dones": "terminated", "values": "value",
    "logprobs": "log_prob",
}  # fmt: skip


class RolloutBuffer(StepBuffer):
    """`num_steps` steps of `num_envs` environments, added one by one.

    `obs [T, N, obs_dim]`, `actions [T, N, action_dim]`, `rewards`, `dones`, `values` and `logprobs [T, N]` are the
    memory itself, and assigning writes into it. `done` is True where the added step ended its episode.
    """

    obs, actions, rewards, dones, values, logprobs = make_memory_views(*_CORE_NAMES.values())

    def __init__(
        self, num_steps: int, num_envs: int, obs_dim: int, action_dim: int, device: torch.device | str, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self.num_steps, self.num_envs = num_steps, num_envs
        self.obs_dim, self.action_dim = obs_dim, action_dim
        seed = choose_seed(seed)
        make = partial(_Rollout, num_steps, num_envs, obs_dim, action_dim, device=device, seed=seed)
        self._rows = StepRows(make, _CORE_NAMES.values())
        self.device: torch.device = self.rewards.device
        self._random = make_generator(self.device, seed)
        self._extras: Mapping[str, Any] = {}

    def add(self, obs: Any, action: Any, reward: Any, done: Any, value: Any, logprob: Any) -> None:
        """Store one step of every environment."""
        rows = self._rows
        if rows.is_full:
            remedy = "Train on the rollout, then set step = 0."
            raise IndexError(explain("add", f"at most {self.num_steps} steps", self.num_steps + 1, remedy))
        rows.write_step((obs, action, reward, as_bools(done), value, logprob))

    def set_extras(self, extras: Mapping[str, Any] | None) -> None:
        """Set tensors `[T, N, …]` to add to every batch; they replace earlier extras."""
        self._extras = extras or {}

    def iterate_minibatches(self, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield every stored step of every environment once, shuffled; the last batch may be shorter."""
        check_positive_int("batch_size", batch_size)
        rows = self._rows
        total = check_nonempty("iterate_minibatches", rows.step) * self.num_envs
        memory = {name: rows.get_flat_memory(core_name) for name, core_name in _CORE_NAMES.items()}
        memory |= {name: self._flatten_extra(name, extra) for name, extra in self._extras.items()}
        order = torch.randperm(total, generator=self._random, device=self.device)
        return ({name: x.index_select(0, index) for name, x in memory.items()} for index in order.split(batch_size))

    def _flatten_extra(self, name: str, extra: Any) -> torch.Tensor:
        """Flatten an extra field to `[step · N, …]`; raise unless it has a row for every stored step."""
        extra = torch.as_tensor(extra, device=self.device)
        steps = self._rows.step
        if extra.ndim < 2 or not steps <= len(extra) <= self.num_steps or extra.shape[1] != self.num_envs:
            expected = f"shape ({self.num_steps}, {self.num_envs}, …)"
            raise SchemaError(explain(f"extra.{name}", expected, tuple(extra.shape), "Pass a value for every step."))
        return extra[:steps].flatten(0, 1)
