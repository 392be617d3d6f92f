"""ApexRL's distillation buffer on ours."""

from __future__ import annotations

from typing import Any

import torch

import relive as rl
from relive.compat.apexrl.buffer.replay_buffer import check_capacity, check_sample
from relive.compat.apexrl.buffer.specs import leaves_of, to_place
from relive.compat.apexrl.utils.observation import Spec
from relive.compat.seeding import experiment_seed
from relive.compat.views import declare


class DistillationBuffer:
    """The newest `capacity` observations and an expert's actions, drawn uniformly with replacement.

    ApexRL documents this class and ships none. What its document leaves open is as in its replay buffer: `add` takes
    one row or a batch of rows, the oldest are overwritten, and no more are drawn than are stored. The first `add` says
    what an action is. `seed` makes the draws repeatable.

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
        check_capacity(capacity)
        self.capacity = capacity
        self.obs_shape = obs_shape
        self.core = rl.DistillationBuffer(capacity, declare(obs_shape), device=device, seed=experiment_seed(seed))

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.core.device

    @property
    def size(self) -> int:
        """How many rows are stored."""
        return len(self.core)

    def __len__(self) -> int:
        """How many rows are stored."""
        return self.size

    def add(self, obs: Any, action: Any) -> None:
        """Store what the expert does in `obs`: one row, or a batch of rows [B, …]."""
        leaves_of("obs", self.obs_shape, obs)  # refuses another form with ApexRL's error
        self.core.add(to_place(obs, self.device), to_place(action, self.device))

    def sample(self, batch_size: int) -> tuple[Any, Any]:
        """`(obs, expert_actions)` of `batch_size` rows."""
        check_sample(batch_size, self.size)
        batch = self.core.sample(batch_size)
        return batch["obs"], batch["action"]

    def clear(self) -> None:
        """Forget every row."""
        self.core.clear()
