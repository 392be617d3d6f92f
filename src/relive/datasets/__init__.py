"""Readers and writers for the datasets of other libraries."""

from relive.datasets.hdf5 import from_hdf5, to_hdf5
from relive.datasets.lerobot import from_lerobot, to_lerobot
from relive.datasets.minari import from_minari, to_minari
from relive.datasets.zarr import from_zarr, to_zarr

__all__ = ["from_hdf5", "from_lerobot", "from_minari", "from_zarr", "to_hdf5", "to_lerobot", "to_minari", "to_zarr"]
