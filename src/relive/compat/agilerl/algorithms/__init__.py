"""AgileRL's `algorithms`: PPO and RecurrentPPO with our rollout buffer, all others as they are."""

from __future__ import annotations

import importlib
from typing import Any

from relive.compat.agilerl.algorithms.ppo import PPO
from relive.compat.agilerl.algorithms.recurrent_ppo import RecurrentPPO

__all__ = ["PPO", "RecurrentPPO"]


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("agilerl.algorithms"), name)
