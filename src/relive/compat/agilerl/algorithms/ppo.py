"""AgileRL's PPO, which makes its own rollout buffer: here it makes ours."""

from __future__ import annotations

import importlib
from typing import Any

from relive.compat.agilerl.components.rollout_buffer import RolloutBuffer
from relive.compat.forwarding import names_of

__all__ = ["PPO"]

theirs: Any = importlib.import_module("agilerl.algorithms.ppo")


class OnOurBuffer:
    """Makes our rollout buffer, now and after mutations, with the settings that AgileRL chose for its own."""

    rollout_buffer: Any

    def create_rollout_buffer(self) -> None:
        """Replace the buffer by an empty one for the current settings."""
        super().create_rollout_buffer()  # pyright: ignore[reportAttributeAccessIssue]
        self.rollout_buffer = RolloutBuffer.like(self.rollout_buffer)


class PPO(OnOurBuffer, theirs.PPO):
    """AgileRL's PPO on our rollout buffer."""


__getattr__ = names_of("agilerl.algorithms.ppo")
