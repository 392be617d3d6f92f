"""AgileRL's recurrent PPO with our rollout buffer."""

from __future__ import annotations

import importlib
from typing import Any

from relive.compat.agilerl.algorithms.ppo import OnOurBuffer

__all__ = ["RecurrentPPO"]

theirs: Any = importlib.import_module("agilerl.algorithms.recurrent_ppo")


class RecurrentPPO(OnOurBuffer, theirs.RecurrentPPO):
    """AgileRL's recurrent PPO on our rollout buffer."""
