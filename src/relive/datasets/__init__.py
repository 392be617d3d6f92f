"""Datasets of other libraries: reading them into buffers, and writing them from buffers."""

from relive.datasets.minari import from_minari, to_minari

__all__ = ["from_minari", "to_minari"]
