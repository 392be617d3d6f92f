"""Minari datasets: read episode by episode into any buffer, and written from a replay buffer."""

from relive.datasets.minari.reading import from_minari
from relive.datasets.minari.writing import to_minari

__all__ = ["from_minari", "to_minari"]
