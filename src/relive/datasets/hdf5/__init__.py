"""HDF5 files of robomimic and D4RL: read block by block into any buffer, and written from a replay buffer."""

from relive.datasets.hdf5.reading import from_hdf5
from relive.datasets.hdf5.writing import to_hdf5

__all__ = ["from_hdf5", "to_hdf5"]
