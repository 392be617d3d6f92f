"""A part of the path that EmbodiChain has its buffers at."""

from relive.compat.forwarding import names_of

__getattr__ = names_of("embodichain.learning.rl", again=True)
