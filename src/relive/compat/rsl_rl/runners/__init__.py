"""rsl_rl's runners with relive's storage in any configured algorithm."""

from relive.compat.rsl_rl.runners.distillation_runner import DistillationRunner
from relive.compat.rsl_rl.runners.on_policy_runner import OnPolicyRunner

__all__ = ["DistillationRunner", "OnPolicyRunner"]
