"""What EmbodiChain's algorithms compute from a rollout."""

from relive.compat.embodichain.learning.rl.algo.common import compute_gae, compute_group_advantage
from relive.compat.forwarding import names_of

__all__ = ["compute_gae", "compute_group_advantage"]

__getattr__ = names_of("embodichain.learning.rl.algo", again=True)
