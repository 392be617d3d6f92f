# pyright: reportMissingImports=false
"""`PrioritizedReplayBuffer`: what Stable-Baselines3 has no buffer for, in the form of its other ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from relive.compat.stable_baselines3.replay import ReplayBuffer
from relive.errors import DataWarning, SchemaError, explain
from relive.replay.samplers import Prioritized, Sampler

_RISING = LinearSchedule(0.4, 1.0, 1.0)

_PATIENCE = 10
"""Batches that may be drawn before the first update of priorities."""


class PrioritizedReplayBufferSamples(NamedTuple):
    """A batch of `ReplayBuffer`, and what makes up for the draws not being uniform."""

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    weights: torch.Tensor
    """Importance weights in (0, 1], [B, 1]."""
    indices: torch.Tensor
    """What `update_priorities` calls these rows."""


class PrioritizedReplayBuffer(ReplayBuffer):
    """Transitions drawn in proportion to (priority + eps)^alpha; new ones have the largest priority so far.

    `beta` is the exponent of the weights: a number, or a schedule of the `progress_remaining` that the algorithm sets.
    Any algorithm can draw from this buffer; only those that use `weights` and call `update_priorities` learn from it
    as they should, and a `DataWarning` says so to the others. All else is `ReplayBuffer`'s. (Schaul et al., Prioritized
    Experience Replay, 2016.)
    """

    progress_remaining = 1.0
    """How much of the training is left: from 1 to 0."""
    _num_drawn = 0
    """Batches that were drawn before the first update."""
    _is_updated = False

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.6,
        beta: float | Callable[[float], float] = _RISING,
        eps: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        self.alpha, self.beta, self.eps = alpha, FloatSchedule(beta), eps
        super().__init__(*args, **kwargs)
        if self._is_custom:  # Stable-Baselines3's loop, which these belong to, draws uniformly
            remedy = "Override sample, and change the batch that super().sample returns."
            expected = "a class without its own _get_samples and conversions"
            raise SchemaError(explain("PrioritizedReplayBuffer", expected, type(self).__name__, remedy))

    def _sampler(self) -> Sampler:
        return Prioritized(self.alpha, lambda _: self.beta(self.progress_remaining), self.eps)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """A batch of transitions drawn by their priorities, normalised as `env` says."""
        if not self._is_told:
            expected, remedy = "steps that were all added with add", "Add steps, and leave pos and full alone."
            raise SchemaError(explain(type(self).__name__, expected, f"pos = {self.pos}", remedy))
        if not self._is_updated:
            self._num_drawn += 1
            if self._num_drawn == _PATIENCE and self.alpha > 0:
                self._warn()
        return super().sample(batch_size, env)

    def _warn(self) -> None:
        remedy = (
            "Stable-Baselines3's own algorithms never update priorities, so that draws stay uniform: use "
            "PrioritizedDQN, PrioritizedSAC or PrioritizedTD3, or call update_priorities(batch.indices, errors)."
        )
        got = f"{_PATIENCE} batches and no update"
        message = explain(type(self).__name__, "update_priorities after sample", got, remedy)
        warnings.warn(message, DataWarning, stacklevel=3)

    def _samples(self, batch: TensorDict, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        weight = batch.get("weight", None)
        weight = batch["reward"].new_ones(len(batch)) if weight is None else weight  # rows that nobody drew
        samples: Any = super()._samples(batch, env)
        return PrioritizedReplayBufferSamples(
            *samples, weights=weight.to(self.device).unsqueeze(1), indices=batch["index"]
        )

    def update_priorities(self, indices: torch.Tensor, priorities: torch.Tensor | np.ndarray) -> None:
        """Give the rows `indices` of a batch new priorities, such as absolute TD errors; skip those overwritten."""
        values = torch.as_tensor(priorities, device="cpu").detach().reshape(-1)
        self._core.update_priority(indices, values)
        self._is_updated = True
