"""Several threads and processes around one buffer."""

from recollect.concurrent.prefetch import Prefetch, prefetch
from recollect.concurrent.processes import Handle, connect
from recollect.concurrent.rate_limit import RateLimit

__all__ = ["Handle", "Prefetch", "RateLimit", "connect", "prefetch"]
