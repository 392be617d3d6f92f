"""Buffers with the signatures of other libraries, one package per library; `patch` puts them into their trainers."""

from relive.compat.patching import patch, unpatch

__all__ = ["patch", "unpatch"]
