"""Wrappers that let several threads and processes use one buffer."""

from relive.concurrent.prefetch import Prefetch, prefetch
from relive.concurrent.processes import Handle, connect
from relive.concurrent.rate_limit import RateLimit

__all__ = ["Handle", "Prefetch", "RateLimit", "connect", "prefetch"]
