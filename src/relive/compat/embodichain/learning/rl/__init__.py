"""A part of the path that EmbodiChain has its buffers at."""
