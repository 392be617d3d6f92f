"""sb3-contrib's `common.maskable`, with our rollout buffers."""

from relive.compat.forwarding import names_of

__getattr__ = names_of("sb3_contrib.common.maskable")
