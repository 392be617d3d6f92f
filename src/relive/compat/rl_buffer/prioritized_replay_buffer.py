"""rl-buffer's `PrioritizedReplayBuffer` on relive's core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from relive.compat.rl_buffer.base_buffer import CPU, ResetStrategy
from relive.compat.rl_buffer.replay_buffer import REPLAY_FIELDS, LocalReplayBuffer, ReplayBatch
from relive.compat.rl_buffer.stats_tracker import StatsTracker
from relive.compat.rl_buffer.utils.sum_tree import SumTree
from relive.errors import explain
from relive.replay.buffer import ReplayBuffer as _Replay
from relive.replay.samplers import Prioritized

__all__ = ["PrioritizedReplayBatch", "PrioritizedReplayBuffer"]


@dataclass
class PrioritizedReplayBatch(ReplayBatch):
    """Transitions `[B]` with their row ids, for `update_priorities`, and importance weights."""

    indices: torch.Tensor
    weights: torch.Tensor


_FIELDS = REPLAY_FIELDS | {"indices": "index", "weights": "weight"}


@dataclass
class _Beta:
    """Schedule of the exponent of importance weights that returns `value`, which can be set."""

    value: float

    def __call__(self, _draws: int) -> float:
        return self.value


class PrioritizedReplayBuffer(LocalReplayBuffer):
    """The newest `buffer_size` time steps of `num_envs` environments, drawn by priority `(|td| + epsilon)^alpha`.

    New rows get the largest priority so far. `alpha`, `beta` and `epsilon` may be set at any time.
    """

    def __init__(
        self, buffer_size: int, num_envs: int, obs_shape: Any, action_shape: tuple[int, ...],
        stats_tracker: StatsTracker, alpha: float = 0.6, beta: float = 0.4, epsilon: float = 1e-6,
        obs_dtype: Any = torch.float32, action_dtype: torch.dtype = torch.float32, device: torch.device = CPU,
        store_device: torch.device | None = None, reset_strategy: ResetStrategy = ResetStrategy.RECURRENT, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(buffer_size, num_envs, stats_tracker, device, store_device, reset_strategy)
        # The sampler is made only because its constructor checks the settings.
        Prioritized(alpha, beta, epsilon)
        self.alpha, self.beta, self.epsilon = alpha, beta, epsilon
        self._current_beta = _Beta(beta)
        # relive's sampler cannot change its exponent, which is therefore 1: `update_priorities` applies `alpha`.
        sampler = Prioritized(1.0, self._current_beta, 0.0)
        self._declare_core(obs_shape, action_shape, obs_dtype, action_dtype, self.store_device, seed, sampler)
        self._use_core(self._make())

    def get(self, batch_size: int, beta: float | None = None) -> PrioritizedReplayBatch:
        """Draw transitions by priority, with weights `(M · P)^-beta` divided by the largest weight of the batch."""
        self._current_beta.value = self.beta if beta is None else beta
        return PrioritizedReplayBatch(**self._sample_batch(batch_size, _FIELDS))

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        """Set the priorities of the rows `indices` from their TD errors; overwritten rows are skipped."""
        rows, errors = (torch.as_tensor(x, device=self.store_device).detach().flatten() for x in (indices, td_errors))
        self.core.update_priority(rows.long(), (errors.double().abs() + self.epsilon).pow(self.alpha))

    @property
    def sum_tree(self) -> SumTree:
        """Tree of all priorities; leaf t · num_envs + env belongs to environment env in row t of the memory."""
        return BufferSumTree(self.core)

    @property
    def _max_priority(self) -> float:
        sampler: Any = self.core.sampler
        return sampler.merge_max_priority()


class BufferSumTree(SumTree):
    """Copy of a buffer's priorities as a `SumTree`; `update` writes to the buffer, too."""

    def __init__(self, core: _Replay) -> None:
        super().__init__(core.capacity)
        ids, first, sums = core.ids(), self._first_leaf, np.frombuffer(self._sums)
        self._core, self._ids = core, ids
        self.data_pointer = (int(ids[-1]) + 1) % self.capacity if len(ids) else 0
        sampler: Any = core.sampler
        sums[first : first + self.capacity] = sampler.masses().cpu()
        # The sums are computed level by level, from the leaves to the root.
        while first > 1:
            first //= 2
            sums[first : 2 * first] = sums[2 * first : 4 * first].reshape(-1, 2).sum(1)

    def _write_priority(self, idx: int, priority: float) -> None:
        row = self._ids[self._ids % self.capacity == idx]
        if not len(row):
            raise IndexError(explain("idx", "the leaf of a stored row", idx, "Add steps first."))
        self._core.update_priority(row, torch.tensor([priority], device="cpu"))
        super()._write_priority(idx, priority)

    def add(self, priority: float) -> None:
        """Raise a TypeError: the buffer's `add` writes new priorities."""
        raise TypeError(explain("SumTree.add", "a tree of its own", "that of a buffer", "Add a step to the buffer."))
