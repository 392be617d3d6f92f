"""rsl_rl's distillation runner with our storage."""

import rsl_rl.runners

from relive.compat.forwarding import names_of
from relive.compat.rsl_rl.runners.on_policy_runner import OnPolicyRunner

__getattr__ = names_of("rsl_rl.runners.distillation_runner")


class DistillationRunner(OnPolicyRunner, rsl_rl.runners.DistillationRunner):
    """rsl_rl's runner; the storage of its algorithm is exchanged for ours."""
