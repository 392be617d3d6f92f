"""Buffers with the signatures of other libraries, one package per library; `patch` lets these libraries use them."""

from relive.compat.patching import patch, unpatch

__all__ = ["patch", "unpatch"]
