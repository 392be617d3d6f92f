# pyright: reportMissingImports=false
"""sb3-contrib's algorithms, with relive's buffers as defaults."""

from __future__ import annotations

import importlib
from typing import Any

from relive.compat.sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from relive.compat.sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from relive.compat.stable_baselines3.algorithms import OffPolicyAlgorithm, OnPolicyAlgorithm

contrib: Any = importlib.import_module("sb3_contrib")


class MaskablePPO(OnPolicyAlgorithm, contrib.MaskablePPO):
    """PPO with action masks on relive's rollout buffer."""

    _buffer_classes = (MaskableRolloutBuffer, MaskableDictRolloutBuffer)


class RecurrentPPO(OnPolicyAlgorithm, contrib.RecurrentPPO):
    """PPO with LSTMs on relive's rollout buffer, which replaces the one that sb3-contrib makes."""

    _buffer_classes = (RecurrentRolloutBuffer, RecurrentDictRolloutBuffer)

    def _setup_model(self) -> None:
        super()._setup_model()
        self.rollout_buffer: Any = self.rollout_buffer_class.make_like(self.rollout_buffer)


class TRPO(OnPolicyAlgorithm, contrib.TRPO):
    """TRPO on relive's rollout buffer."""


class QRDQN(OffPolicyAlgorithm, contrib.QRDQN):
    """QR-DQN on relive's replay buffer."""


class TQC(OffPolicyAlgorithm, contrib.TQC):
    """TQC on relive's replay buffer."""


class CrossQ(OffPolicyAlgorithm, contrib.CrossQ):
    """CrossQ on relive's replay buffer."""
