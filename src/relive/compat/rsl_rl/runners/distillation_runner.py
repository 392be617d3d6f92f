"""rsl_rl's distillation runner with relive's storage."""

import rsl_rl.runners

from relive.compat.rsl_rl.runners.on_policy_runner import OnPolicyRunner


class DistillationRunner(OnPolicyRunner, rsl_rl.runners.DistillationRunner):
    """rsl_rl's distillation runner with relive's storage in its algorithm."""
