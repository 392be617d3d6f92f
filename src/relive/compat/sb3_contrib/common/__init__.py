"""sb3-contrib's `common`: rollout buffers are ours, all other modules its own."""

from relive.compat.forwarding import names_of

__getattr__ = names_of("sb3_contrib.common")
