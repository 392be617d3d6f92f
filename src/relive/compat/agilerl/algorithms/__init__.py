"""AgileRL's `algorithms`: PPO and RecurrentPPO with our rollout buffer, all others as they are."""

from contextlib import suppress

from relive.compat.agilerl.algorithms.ppo import PPO
from relive.compat.forwarding import names_of

with suppress(ModuleNotFoundError):  # AgileRL before 2.58 has no such module
    from relive.compat.agilerl.algorithms.recurrent_ppo import RecurrentPPO

__all__ = ["PPO", "RecurrentPPO"]

__getattr__ = names_of("agilerl.algorithms")
