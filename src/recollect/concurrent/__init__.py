"""Several threads and processes around one buffer."""

from recollect.concurrent.processes import Handle, connect

__all__ = ["Handle", "connect"]
