"""rl-buffer's `RolloutBuffer` on relive's core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from relive import estimators
from relive.compat.rl_buffer.base_buffer import (
    CPU,
    BaseBuffer,
    ResetStrategy,
    check_not_full,
    fit_tree,
    update_stats,
)
from relive.compat.rl_buffer.stats_tracker import StatsTracker, to_numpy
from relive.compat.seeding import choose_seed, make_generator
from relive.compat.step_rows import SCORES, StepBuffer, StepRows, fit_value
from relive.compat.views import as_bools, declare_spec, gather_rows, list_named_leaves, make_memory_views
from relive.errors import NotReadyError, explain
from relive.rollout.buffer import RolloutBuffer as _Rollout
from relive.schema.checks import check_positive_int

__all__ = ["RolloutBatch", "RolloutBuffer", "SequenceBatch", "explained_variance"]


def explained_variance(y_pred: torch.Tensor, y_true: torch.Tensor) -> float:
    """Return the fraction of the variance of `y_true` that `y_pred` explains; see `relive.explained_variance`."""
    return float(estimators.explained_variance(y_pred, y_true))


@dataclass
class RolloutBatch:
    """Steps `[B]` with advantages and returns."""

    observations: Any
    actions: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    log_probs: torch.Tensor


@dataclass
class SequenceBatch(RolloutBatch):
    """Sequences `[B, L]` of steps, zero where `masks` is False; `starts` marks the first steps of episodes."""

    masks: torch.Tensor
    starts: torch.Tensor


_STEP_FIELDS = ("obs", "action", "reward", "terminated", "value", "log_prob")
_BATCH_FIELDS = {
    "observations": "obs", "actions": "action", "values": "value", "log_probs": "log_prob", "returns": "return",
    "advantages": "advantage",
}  # fmt: skip
"""Core's name of each field of a batch."""
_SEQUENCE_FIELDS = {**_BATCH_FIELDS, "masks": "mask", "starts": "is_first"}


class RolloutBuffer(StepBuffer, BaseBuffer):
    """`buffer_size` time steps of `num_envs` environments, with advantages and returns.

    `obs_shape` may be a dict of shapes (and `obs_dtype` a dict of dtypes): observations are then TensorDicts.
    """

    def __init__(
        self, buffer_size: int, num_envs: int, obs_shape: Any, action_shape: tuple[int, ...],
        stats_tracker: StatsTracker, obs_dtype: Any = torch.float32, action_dtype: torch.dtype = torch.float32,
        gamma: float = 0.99, gae_lambda: float = 0.95, device: torch.device = CPU,
        store_device: torch.device | None = None, reset_strategy: ResetStrategy = ResetStrategy.ERROR, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(buffer_size, num_envs, stats_tracker, device, store_device, reset_strategy)
        fields = declare_spec(obs_shape, obs_dtype), declare_spec(action_shape, action_dtype)
        seed = choose_seed(seed)
        settings: dict[str, Any] = {"device": self.store_device, "seed": seed}
        self._rows = StepRows(partial(_Rollout, buffer_size, num_envs, *fields, **settings), _STEP_FIELDS)
        self._random = make_generator(self.store_device, seed)
        self.obs_shape, self.action_shape = obs_shape, action_shape
        self.gamma, self.gae_lambda = gamma, gae_lambda

    def _remove_steps(self) -> None:
        self._rows.clear()

    @property
    def _pos(self) -> int:
        return self._rows.step

    @_pos.setter
    def _pos(self, pos: int) -> None:
        self._rows.step = pos

    @property
    def _full(self) -> bool:
        return self._rows.is_full

    @_full.setter
    def _full(self, full: bool) -> None:
        if full != self._rows.is_full:
            raise AttributeError(explain("_full", self._rows.is_full, full, "Set _pos to the number of rows written."))

    def add(
        self, obs: Any, action: Any, reward: Any, done: Any, value: Any, log_prob: Any,
        infos: Mapping[str, Any] | None = None, done_reasons: Sequence[str | None] | None = None,
    ) -> None:  # fmt: skip
        """Store one step of every environment; `done` is True where this step ended its episode."""
        rows = self._rows
        check_not_full(rows.is_full, self.reset_strategy)
        values = (obs, action, reward, as_bools(done), value, log_prob)
        step = [fit_tree(name, value, place) for (name, place), value in zip(rows.field_rows, values, strict=True)]
        update_stats(self._stats_tracker, to_numpy(step[3]), step[2], infos, done_reasons)
        if rows.is_full:
            self._make_room_for_step()
        rows.write_step(
            step if type(step[0]) is torch.Tensor else [leaf for x in step for _, leaf in list_named_leaves("", x)]
        )

    @contextmanager
    def add_context(self, *args: Any, **kwargs: Any) -> Iterator[int]:
        """Yield the row of the next step in `_observations`, `_actions`, …; see `BaseBuffer.add_context`."""
        if self._full and self.reset_strategy is ResetStrategy.RECURRENT:
            self._make_room_for_step()
        with super().add_context(*args, **kwargs) as pos:
            yield pos

    def _make_room_for_step(self) -> None:
        if self.reset_strategy is ResetStrategy.AUTO:
            self.reset()
            return
        for name in _STEP_FIELDS:
            for _, tensor in list_named_leaves(name, self._rows.tensors[name]):
                tensor[:-1] = tensor[1:].clone()
        self._rows.step -= 1

    def compute_returns_and_advantages(self, last_values: Any, last_dones: Any) -> None:
        """Compute generalised advantages and returns of the stored steps (see `relive.gae`).

        `last_values` `[N]` are the values of the observations after the last step; they are not used where `last_dones`
        is True, since the last step ended the episode.
        """
        ended, value = self._rows.tensors["terminated"], self._rows.tensors["value"]
        last = fit_value("last_values", _flatten_to_tensor(last_values), value[0])
        ended_last = fit_value("last_dones", as_bools(_flatten_to_tensor(last_dones)), ended[0])
        self._rows.compute_scores(last.masked_fill(ended_last, 0.0), ended, gamma=self.gamma, lam=self.gae_lambda)

    def get(self, batch_size: int, shuffle: bool = True) -> Iterator[RolloutBatch]:
        """Yield every stored step once, in batches; the last may be shorter. Call it again for another epoch."""
        self._require_score("get")
        check_positive_int("batch_size", batch_size)
        count = self.total_current_size
        columns = {name: self._rows.get_flat_memory(field) for name, field in _BATCH_FIELDS.items()}
        if shuffle:
            order = torch.randperm(count, generator=self._random, device=self.store_device)
        else:
            order = torch.arange(count, device=self.store_device)
        batches = ({name: gather_rows(index, x) for name, x in columns.items()} for index in order.split(batch_size))
        if self.device != self.store_device:
            batches = ({name: x.to(self.device) for name, x in batch.items()} for batch in batches)
        return (RolloutBatch(**batch) for batch in batches)

    def get_sequences(
        self, sequence_length: int | None, batch_size: int, shuffle: bool = True
    ) -> Iterator[SequenceBatch]:
        """Yield every stored step once, as sequences `[B, L]` that stop at the end of an episode.

        `sequence_length=None` yields whole episodes. See `relive.RolloutBuffer.sequences`.
        """
        self._require_score("get_sequences")
        sequences = self.core.sequences(sequence_length, batch_size=batch_size, shuffle=shuffle, device=self.device)
        return (
            SequenceBatch(**{name: batch[field] for name, field in _SEQUENCE_FIELDS.items()}) for batch in sequences
        )

    def _require_score(self, where: str, name: str = "advantage") -> torch.Tensor:
        """Return the advantages or returns of the stored steps; raise if they are not computed."""
        if name not in self._rows.scores:
            remedy = "Call compute_returns_and_advantages first."
            raise NotReadyError(explain(where, "advantages and returns", f"a rollout without {name!r}", remedy))
        return self._rows.scores[name][: self._rows.step]

    _observations, _actions, _rewards, _dones, _values, _log_probs = make_memory_views(*_STEP_FIELDS)
    _advantages, _returns = make_memory_views(*SCORES)

    def _get_memory(self, field: str) -> Any:
        return self._require_score(f"{field}s", field) if field in SCORES else self._rows.get_memory(field)

    def normalize_advantages(self) -> None:
        """Normalize the advantages to mean 0 and population standard deviation 1."""
        _normalize_in_place(self._advantages)

    def normalize_returns(self) -> None:
        """Normalize the returns to mean 0 and population standard deviation 1."""
        _normalize_in_place(self._returns)

    @property
    def explained_variance(self) -> float:
        """Fraction of the variance of the returns that the values explain."""
        return explained_variance(self._values[: self._rows.step], self._returns)

    @property
    def advantages_mean(self) -> float:
        """Mean of the advantages."""
        return float(self._advantages.mean())

    @property
    def advantages_std(self) -> float:
        """Unbiased standard deviation of the advantages; 0 for a single step."""
        return _compute_unbiased_std(self._advantages)

    @property
    def returns_mean(self) -> float:
        """Mean of the returns."""
        return float(self._returns.mean())

    @property
    def returns_std(self) -> float:
        """Unbiased standard deviation of the returns; 0 for a single step."""
        return _compute_unbiased_std(self._returns)


def _normalize_in_place(values: torch.Tensor) -> None:
    deviation, mean = torch.std_mean(values, correction=0)
    values.sub_(mean).div_(deviation + 1e-6)


def _compute_unbiased_std(values: torch.Tensor) -> float:
    return float(values.std()) if values.numel() > 1 else 0.0


def _flatten_to_tensor(value: Any) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
    return tensor.flatten()
