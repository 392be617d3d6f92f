"""Where data lives, and the arrays that a buffer gets there."""

from recollect.memory.device import Memory, device_of
from recollect.memory.room import Heap, Room

__all__ = ["Heap", "Memory", "Room", "device_of"]
