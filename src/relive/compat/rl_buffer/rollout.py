"""rl-buffer's `RolloutBuffer` on ours."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from relive import estimators
from relive.compat.rl_buffer.limits import CPU, BaseBuffer, ResetStrategy, fields_of, renamed
from relive.compat.rl_buffer.statistics import StatsTracker
from relive.errors import NotReadyError, explain
from relive.fields.conversion import conform
from relive.fields.schema import Field
from relive.rollout.buffer import RolloutBuffer as _Rollout


def explained_variance(y_pred: torch.Tensor, y_true: torch.Tensor) -> float:
    """How much of the variance of `y_true` the predictions explain; NaN if it has none. See our own of that name."""
    return float(estimators.explained_variance(y_pred, y_true))


@dataclass
class RolloutBatch:
    """Steps `[B]` with what is learnt from them."""

    observations: torch.Tensor
    actions: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    log_probs: torch.Tensor


_ROLLOUT_FIELDS = {
    "observations": "obs",
    "actions": "action",
    "returns": "return",
    "advantages": "advantage",
    "values": "value",
    "log_probs": "log_prob",
}


class RolloutBuffer(BaseBuffer):
    """`buffer_size` time steps of `num_envs` environments, with advantages and returns."""

    core: _Rollout

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        stats_tracker: StatsTracker,
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype = torch.float32,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        device: torch.device = CPU,
        store_device: torch.device | None = None,
        reset_strategy: ResetStrategy = ResetStrategy.ERROR,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(buffer_size, num_envs, stats_tracker, device, store_device, reset_strategy)
        self.obs_shape, self.action_shape = obs_shape, action_shape
        self.gamma, self.gae_lambda = gamma, gae_lambda
        fields = Field(obs_shape, obs_dtype), Field(action_shape, action_dtype)
        self.core = _Rollout(
            buffer_size, num_envs, *fields, device=self.store_device, seed=seed
        )  # fmt: skip
        memory = self.core.columns
        self._fields = fields_of(memory)
        self._observations, self._actions, self._rewards, self._dones, self._values, self._log_probs = (
            memory[name] for name in ("obs", "action", "reward", "terminated", "value", "log_prob")
        )

    def _make_room(self) -> None:
        super()._make_room()
        if self.reset_strategy is ResetStrategy.RECURRENT:
            memory = self.core.lend()
            memory[:, :-2] = memory[:, 1:-1].clone()
            self.core.take_back(self._buffer_size - 1)

    def add(
        self,
        obs: torch.Tensor,
        action: torch.Tensor,
        reward: torch.Tensor,
        done: torch.Tensor,
        value: torch.Tensor,
        log_prob: torch.Tensor,
        infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> None:
        """Store one step of every environment; `done` says whether this step ended the episode."""
        flags = {"terminated": self._stored(done) != 0, "truncated": np.zeros(self.num_envs, dtype=bool)}
        critic = {"value": value, "log_prob": log_prob}
        self._add(infos, done_reasons, obs=obs, action=action, reward=reward, **flags, **critic)

    def compute_returns_and_advantages(self, last_values: torch.Tensor, last_dones: torch.Tensor) -> None:
        """Generalised advantage estimation over the stored steps (see `relive.gae`).

        `last_values` `[N]` are the values of the observations after the last step; where `last_dones` they are not
        used, since the last step ended the episode.
        """
        given = {"last_values": last_values, "last_dones": last_dones}
        last, over = (
            conform(name, Field(), torch.as_tensor(self._stored(x)).flatten(), (self.num_envs,), self.store_device)
            for name, x in given.items()
        )
        self.core.compute_advantage(last.masked_fill(over != 0, 0.0), gamma=self.gamma, lam=self.gae_lambda)

    def get(self, batch_size: int, shuffle: bool = True) -> Generator[RolloutBatch, None, None]:
        """Every stored step once, in batches of which the last may be shorter; call it again for another epoch."""
        self._computed("get")
        fields = _ROLLOUT_FIELDS.values()
        batches = self.core.minibatches(batch_size, shuffle=shuffle, fields=fields, device=self.device)
        return (RolloutBatch(**renamed(_ROLLOUT_FIELDS, batch)) for batch in batches)

    def _computed(self, where: str, name: str = "advantage") -> torch.Tensor:
        """The advantages or returns of the stored steps."""
        data = self.core.data
        if name not in data.keys():
            remedy = "Call compute_returns_and_advantages first."
            raise NotReadyError(explain(where, "advantages and returns", f"a rollout without {name!r}", remedy))
        return data[name]

    @property
    def _advantages(self) -> torch.Tensor:
        return self._computed("advantages")

    @property
    def _returns(self) -> torch.Tensor:
        return self._computed("returns", "return")

    def normalize_advantages(self) -> None:
        """Give the advantages mean 0 and (population) deviation 1."""
        self.core.attach({"advantage": estimators.normalize(self._advantages, eps=1e-6, correction=0)})

    def normalize_returns(self) -> None:
        """Give the returns mean 0 and (population) deviation 1."""
        self.core.attach({"return": estimators.normalize(self._returns, eps=1e-6, correction=0)})

    @property
    def explained_variance(self) -> float:
        """How much of the variance of the returns the values explain."""
        return explained_variance(self.core["value"], self._returns)

    @property
    def advantages_mean(self) -> float:
        """The mean advantage."""
        return float(self._advantages.mean())

    @property
    def advantages_std(self) -> float:
        """The unbiased deviation of the advantages; 0 for a single one."""
        return _deviation(self._advantages)

    @property
    def returns_mean(self) -> float:
        """The mean return."""
        return float(self._returns.mean())

    @property
    def returns_std(self) -> float:
        """The unbiased deviation of the returns; 0 for a single one."""
        return _deviation(self._returns)


def _deviation(x: torch.Tensor) -> float:
    return float(x.std()) if x.numel() > 1 else 0.0
