"""Where releases before 0.2.3 had them."""

from relive.compat.embodichain.learning.rl.algo import compute_gae, compute_group_advantage
from relive.compat.forwarding import names_of

__all__ = ["compute_gae", "compute_group_advantage"]

__getattr__ = names_of("embodichain.agents.rl.algo", again=True)
