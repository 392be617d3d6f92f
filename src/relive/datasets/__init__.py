"""Datasets of other libraries: read into buffers, written from them."""

from relive.datasets.minari import from_minari, to_minari

__all__ = ["from_minari", "to_minari"]
