"""rsl_rl's algorithms with our storage: `"class_name": "relive.compat.rsl_rl.algorithms:PPO"` in a configuration."""

from relive.compat.rsl_rl.algorithms.distillation import Distillation
from relive.compat.rsl_rl.algorithms.ppo import PPO

__all__ = ["PPO", "Distillation"]
