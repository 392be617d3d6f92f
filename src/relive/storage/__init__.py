"""Where data lives, and the arrays that a buffer gets there."""

from relive.storage.allocator import Allocator, LocalAllocator, Memory

__all__ = ["Allocator", "LocalAllocator", "Memory"]
