"""ApexRL's distillation buffer on relive's core."""

from __future__ import annotations

from typing import Any

import torch

import relive as rl
from relive.compat.apexrl.buffer.replay_buffer import check_sample_size
from relive.compat.apexrl.buffer.specs import list_leaves, to_device
from relive.compat.apexrl.utils.observation import Spec
from relive.compat.seeding import choose_seed
from relive.compat.views import declare_spec


class DistillationBuffer:
    """The newest `capacity` observations and an expert's actions, drawn uniformly with replacement.

    ApexRL documents this class but does not ship it. Undocumented behaviour follows ApexRL's replay buffer: `add`
    accepts one row or a batch, the oldest rows are overwritten, and `batch_size` is at most the number of stored rows.
    The first `add` declares the action. `seed` makes the draws repeatable.

    >>> buffer = DistillationBuffer(capacity=100, obs_shape=(2,), device="cpu")
    >>> buffer.add(torch.zeros(3, 2), torch.full((3, 1), 0.7))
    >>> obs, expert_actions = buffer.sample(batch_size=2)
    >>> expert_actions
    tensor([[0.7000],
            [0.7000]])
    """

    def __init__(
        self, capacity: int, obs_shape: Spec, device: torch.device | str = "cpu", *, seed: int | None = None
    ) -> None:
        self.capacity = capacity
        self.obs_shape = obs_shape
        self.core = rl.DistillationBuffer(capacity, declare_spec(obs_shape), device=device, seed=choose_seed(seed))

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.core.device

    @property
    def size(self) -> int:
        """Number of stored rows."""
        return len(self.core)

    def __len__(self) -> int:
        """Number of stored rows."""
        return self.size

    def add(self, obs: Any, action: Any) -> None:
        """Store an observation and the expert's action: one row, or a batch of rows [B, …]."""
        # ApexRL raises a TypeError for observations of another structure, and so does `list_leaves`.
        list_leaves("obs", self.obs_shape, obs)
        self.core.add(to_device(obs, self.device), to_device(action, self.device))

    def sample(self, batch_size: int) -> tuple[Any, torch.Tensor]:
        """Draw `batch_size` rows as `(obs, expert_actions)`."""
        check_sample_size(batch_size, self.size)
        batch = self.core.sample(batch_size)
        return batch["obs"], batch["action"]

    def clear(self) -> None:
        """Remove every row."""
        self.core.clear()
