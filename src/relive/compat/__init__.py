"""Other libraries' signatures on our core, one package each; `patch` puts our buffers into their trainers."""

from relive.compat.patching import patch, unpatch

__all__ = ["patch", "unpatch"]
