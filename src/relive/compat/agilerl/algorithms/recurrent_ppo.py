# pyright: reportMissingImports=false
"""AgileRL's recurrent PPO with our rollout buffer."""

from __future__ import annotations

from agilerl.algorithms import recurrent_ppo as theirs

from relive.compat.agilerl.algorithms.ppo import OnOurBuffer

__all__ = ["RecurrentPPO"]


class RecurrentPPO(OnOurBuffer, theirs.RecurrentPPO):
    """AgileRL's recurrent PPO on our rollout buffer."""
