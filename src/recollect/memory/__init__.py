"""Where data lives, and the arrays that a buffer gets there."""

from recollect.memory.device import Memory, device_of
from recollect.memory.room import Heap, Keeper, Room

__all__ = ["Heap", "Keeper", "Memory", "Room", "device_of"]
