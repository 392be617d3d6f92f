"""Where data lives, and the arrays that a buffer gets there."""

from relive.memory.device import Memory
from relive.memory.room import Heap, Keeper, Room

__all__ = ["Heap", "Keeper", "Memory", "Room"]
