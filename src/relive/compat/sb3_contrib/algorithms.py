# pyright: reportMissingImports=false
"""sb3-contrib's algorithms, with our buffers where it would choose its own."""

from __future__ import annotations

import importlib
from typing import Any

from gymnasium import spaces

from relive.compat.sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from relive.compat.sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from relive.compat.stable_baselines3.defaults import OffPolicy, OnPolicy

theirs: Any = importlib.import_module("sb3_contrib")


class MaskablePPO(OnPolicy, theirs.MaskablePPO):
    """PPO with action masks on our rollout buffer."""

    _chosen = (MaskableRolloutBuffer, MaskableDictRolloutBuffer)


class RecurrentPPO(theirs.RecurrentPPO):
    """PPO with LSTMs on our rollout buffer, which takes the place of the one that sb3-contrib makes."""

    rollout_buffer: Any

    def _setup_model(self) -> None:
        super()._setup_model()
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = RecurrentDictRolloutBuffer if nested else RecurrentRolloutBuffer
        self.rollout_buffer = kind.like(self.rollout_buffer)


class TRPO(OnPolicy, theirs.TRPO):
    """TRPO on our rollout buffer."""


class QRDQN(OffPolicy, theirs.QRDQN):
    """QR-DQN on our replay buffer."""


class TQC(OffPolicy, theirs.TQC):
    """TQC on our replay buffer."""


class CrossQ(OffPolicy, theirs.CrossQ):
    """CrossQ on our replay buffer."""
