"""Allocators of a buffer's arrays: in the memory of this process, in shared memory, or in files."""

from relive.storage.allocator import Allocator, LocalAllocator, Memory

__all__ = ["Allocator", "LocalAllocator", "Memory"]
