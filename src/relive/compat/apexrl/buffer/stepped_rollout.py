"""What ApexRL's rollout buffers of one agent have in common: their tensors, and where episodes end."""

from __future__ import annotations

import torch

import relive as rl
from relive.compat.step_rows import Stepped
from relive.compat.views import MemoryView

PRIVILEGED = "privileged_observations"


class SteppedRollout(Stepped):
    """Steps of one agent: the attributes are the memory itself, `[num_steps, num_envs, …]`."""

    num_envs: int

    observations = MemoryView("obs")
    privileged_observations = MemoryView()
    actions = MemoryView("action")
    rewards = MemoryView("reward")
    dones = MemoryView()
    values = MemoryView("value")
    log_probs = MemoryView("log_prob")
    advantages = MemoryView("advantage")
    returns = MemoryView("return")

    @property
    def core(self) -> rl.RolloutBuffer:
        """The relive buffer underneath, with the steps that are stored now, and episodes that end where `dones` say."""
        self._rows.tensors["terminated"].copy_(self._rows.tensors["dones"] != 0)
        return self._rows.core

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.rewards.device

    def __len__(self) -> int:
        """How many transitions are stored."""
        return self._rows.step * self.num_envs
