"""rsl_rl's runners with our storage, whatever algorithm the configuration names."""

from relive.compat.rsl_rl.runners.distillation_runner import DistillationRunner
from relive.compat.rsl_rl.runners.on_policy_runner import OnPolicyRunner

__all__ = ["DistillationRunner", "OnPolicyRunner"]
