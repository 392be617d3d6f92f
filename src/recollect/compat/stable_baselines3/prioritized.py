# pyright: reportMissingImports=false
"""`PrioritizedReplayBuffer`: what Stable-Baselines3 has no buffer for, in the form of its other ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from recollect.compat.stable_baselines3.replay import ReplayBuffer
from recollect.samplers import Prioritized, Sampler


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
    index: torch.Tensor
    """What `update_priorities` calls these rows."""


class PrioritizedReplayBuffer(ReplayBuffer):
    """Transitions drawn in proportion to (priority + eps)^alpha; new ones have the largest priority so far.

    `beta` is the exponent of the weights and may be changed at any time: the algorithms of this package raise it to 1.
    Any algorithm can draw from this buffer; only those that use `weights` and call `update_priorities` learn from it
    as they should. (Schaul et al., Prioritized Experience Replay, 2016.)
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
    ) -> None:
        self.alpha, self.beta, self.eps = alpha, beta, eps
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
        )

    def _sampler(self) -> Sampler:
        return Prioritized(self.alpha, lambda _: self.beta, self.eps)

    def _samples(self, batch: TensorDict, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        samples = super()._samples(batch, env)
        weight = batch.get("weight", None)
        weight = torch.ones_like(batch["reward"]) if weight is None else weight
        return PrioritizedReplayBufferSamples(*samples, weight.to(self.device).unsqueeze(1), batch["index"])

    def update_priorities(self, index: torch.Tensor, priorities: torch.Tensor | np.ndarray) -> None:
        """Give the rows `index` of a batch new priorities, such as absolute TD errors; overwritten ones are skipped."""
        values = torch.as_tensor(priorities).detach().cpu().reshape(-1)
        self._core.update_priority(index, values)
