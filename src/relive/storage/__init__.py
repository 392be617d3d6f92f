"""Memory of a process's own, shared memory and disk memory, and the arrays that a buffer gets there."""

from relive.storage.allocator import Allocator, LocalAllocator, Memory

__all__ = ["Allocator", "LocalAllocator", "Memory"]
