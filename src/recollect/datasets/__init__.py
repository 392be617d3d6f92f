"""Datasets of other libraries: read into buffers, written from them."""

from recollect.datasets.minari import from_minari, to_minari

__all__ = ["from_minari", "to_minari"]
