"""LeRobot datasets (v3): read block by block into any buffer, and written from a replay buffer."""

from relive.datasets.lerobot.reading import from_lerobot
from relive.datasets.lerobot.writing import to_lerobot

__all__ = ["from_lerobot", "to_lerobot"]
