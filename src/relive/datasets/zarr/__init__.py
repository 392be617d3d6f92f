"""Zarr stores in diffusion policy's layout: read block by block into any buffer, and written from a replay buffer."""

from relive.datasets.zarr.reading import from_zarr
from relive.datasets.zarr.writing import to_zarr

__all__ = ["from_zarr", "to_zarr"]
