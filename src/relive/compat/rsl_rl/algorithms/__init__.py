"""rsl_rl's algorithms with relive's storage: `"class_name": "relive.compat.rsl_rl.algorithms:PPO"` in a config."""

from relive.compat.rsl_rl.algorithms.distillation import Distillation
from relive.compat.rsl_rl.algorithms.ppo import PPO

__all__ = ["PPO", "Distillation"]
