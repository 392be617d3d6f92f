"""`Memory`, the kind of memory that a user chooses, and `Allocator`, which allocates the arrays of one buffer in it."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from relive import kernels
from relive.errors import SchemaError, explain
from relive.schema.conversion import as_device

if TYPE_CHECKING:
    from relive.replay.recovery import RecoverableBuffer

_HOST_MEMORY = "the free memory of this machine"
"""Name of the host's memory in messages."""


class Allocator:
    """Interface: allocates the named arrays of one buffer, and the lock that guards them.

    The methods here are for memory that ends with the process.
    """

    device: torch.device
    name: str
    """Kind of memory: own, pinned, shared or disk."""
    persistent = False
    """Whether the arrays outlive this process, which may die in the middle of a step."""
    durable = False
    """Whether the arrays survive a power loss. Then rows have checksums, and every write begins with `before_write`."""
    reopened = False
    """Whether the arrays have earlier contents instead of zeros."""
    is_open = True
    """False after `close`."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the array `name`; it may be written in inference mode and outside it."""
        raise NotImplementedError

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        """Return a re-entrant lock, which calls `recover` when it is acquired after a process died while holding it."""
        raise NotImplementedError

    def recover(self, buffer: RecoverableBuffer, *, resumes: bool) -> None:
        """Recover a buffer that was built with reopened arrays; with `resumes`, restore its random stream too."""

    def before_write(self, steps: int) -> None:
        """Prepare for a write of `steps` steps."""

    def commit(self) -> None:
        """Wait until everything is on the disk."""

    def replacing_contents(self) -> AbstractContextManager[None]:
        """Return a context for replacing all contents: if the process dies inside, the memory is empty."""
        return nullcontext()

    def reading_in_order(self) -> AbstractContextManager[None]:
        """Return a context for reading rows in order instead of randomly."""
        return nullcontext()

    def close(self) -> None:
        """Commit, and release the memory."""


class LocalAllocator(Allocator):
    """Memory of this process alone, on any device."""

    def __init__(self, device: torch.device, is_pinned: bool = False) -> None:
        self.device, self._is_pinned = device, is_pinned
        self.name = "pinned" if is_pinned else "own"

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            if self.device.type == "cpu" and not self._is_pinned:
                return allocate_zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=self.device, pin_memory=self._is_pinned)

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        return make_stream_lock(self.device) if self.device.type == "cuda" else threading.RLock()


@dataclass(frozen=True)
class Memory:
    """A kind of memory, for the argument `device` of a buffer.

    `Memory.pinned()`, `Memory.shared()` and `Memory.disk(path)` make one.

    Args:
        device: the torch device of the tensors.
        allocator: function of a buffer that has settings but no arrays yet, which returns its allocator; None for the
            own memory of this process.
        free_bytes: function that returns the number of free bytes, or None if any number fits.
        name: expression that makes this memory, for messages.
        free_of: description of the bytes that `free_bytes` counts, for messages.
        is_pinned: whether an accelerator can copy from it asynchronously.

    >>> Memory.of("cpu"), Memory.shared()
    (Memory.of('cpu'), Memory.shared())
    """

    device: torch.device
    allocator: Callable[[Any], Allocator] | None = None
    free_bytes: Callable[[], int | None] | None = None
    name: str = ""
    free_of: str = _HOST_MEMORY
    is_pinned: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several processes may use the memory."""
        return self.name == "Memory.shared()"

    @staticmethod
    def pinned() -> Memory:
        """Host memory that an accelerator can read directly. Batches are ordinary memory: see `out=` of `sample`."""
        if not torch.accelerator.is_available():
            raise SchemaError(explain("Memory.pinned", "an accelerator", "a machine without one", 'Pass device="cpu".'))
        return Memory(torch.device("cpu"), is_pinned=True)

    @staticmethod
    def shared() -> Memory:
        """Host memory that other processes of this machine use too: see `ReplayBuffer.handle`. Linux only."""
        from relive.storage.shared import SharedAllocator  # noqa: PLC0415 (it imports this module)

        return Memory(torch.device("cpu"), allocator=SharedAllocator.create, name="Memory.shared()")

    @staticmethod
    def disk(path: str | PathLike[str], *, commit_every: int | None = None) -> Memory:
        """Files in the folder `path`, which may be larger than memory and can be reopened by a later process.

        An empty or absent folder becomes the memory of a new replay buffer. A folder with a buffer is reopened if the
        settings are the same; `relive.load(path)` needs no settings. Only one process can use a folder at a time.

        A killed process loses the step it was writing. A power loss destroys the steps since the last commit, and as
        many of the oldest rows. `ReplayBuffer.commit` and `close` commit, and so does adding: after `commit_every`
        steps (by default an eighth of the capacity or 256 MiB, whichever is less), and after a minute. Linux only,
        with relive's native core.
        """
        from relive.storage.disk import disk_memory  # noqa: PLC0415 (it imports this module)

        return disk_memory(path, commit_every)

    @staticmethod
    def of(device: torch.device | str | Memory) -> Memory:
        """Return the memory for a `device=` argument; "cuda" means the current device of this thread."""
        if isinstance(device, Memory):
            return device
        resolved_device = as_device(device)
        if resolved_device.type == "cuda" and resolved_device.index is None and torch.cuda.is_available():
            # The index is resolved now, so that later calls use the same device whatever device is current then.
            resolved_device = torch.device("cuda", torch.cuda.current_device())
        return Memory(resolved_device)

    def __repr__(self) -> str:
        return self.name or ("Memory.pinned()" if self.is_pinned else f"Memory.of({str(self.device)!r})")

    def open(self, owner: Any) -> Allocator:
        """Return an allocator for `owner`, a buffer with settings but without arrays."""
        return LocalAllocator(self.device, self.is_pinned) if self.allocator is None else self.allocator(owner)

    def open_own_memory(self, kind: str) -> Allocator:
        """Return an allocator for a class of buffers; raise for shared and disk memory, which it does not support."""
        if self.allocator is not None:
            remedy = "Pass a torch device. Only a ReplayBuffer can be in shared or disk memory."
            raise SchemaError(explain("device", f"a torch device for a {kind}", self, remedy))
        return self.open(None)

    def require_free_bytes(self, nbytes: int, where: str = "capacity") -> None:
        """Raise a MemoryError if `nbytes` do not fit beside the memory that other buffers have reserved.

        Pages are allocated when they are written: without this check the process would be killed much later. `where` is
        the argument of the buffer that determines its size.
        """
        free_bytes = None
        if self.free_bytes is not None:
            free_bytes = self.free_bytes()
        elif self.device.type == "cpu" and (available := available_host_bytes()) is not None:
            free_bytes = max(available - unwritten_bytes(), 0)
        remedy = f"Lower {where}, store frames as Stacked, or use smaller dtypes."
        _require_free(nbytes, free_bytes, where, remedy, self.free_of)


_MAPPED_BYTES = 1 << 15
"""Arrays of at least this many bytes are mapped: their pages are allocated when they are written."""
_LARGE_PAGE = 1 << 21
"""Bytes of a large page. Only arrays of at least two large pages use them."""
_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_mapping_bytes: dict[int, int] = {}
"""Bytes of each mapping of `allocate_zeros` that is still in use, by its id."""


def tensor_from_mapping(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over the first bytes of a mapping."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a zero tensor whose pages are allocated when they are written.

    The pages are small: on virtual machines the first write into a page of 2 MiB takes milliseconds, and two to three
    times as long per byte (see benchmarks/first_fill.py).
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MAPPED_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        # The size is rounded up, because Linux aligns mappings of whole large pages as `request_large_pages` needs.
        reserved = -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE if nbytes >= 2 * _LARGE_PAGE else nbytes
        memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        remedy = "Make a smaller buffer, or raise the limit of this process."
        raise MemoryError(explain("memory", _format_bytes(nbytes), error.strerror, remedy)) from error
    _mapping_bytes[id(memory)] = nbytes
    weakref.finalize(memory, _mapping_bytes.pop, id(memory), None)
    return tensor_from_mapping(memory, shape, dtype)


def request_large_pages(array: torch.Tensor) -> None:
    """Request large pages for a contiguous host array that is about to be filled at once.

    This makes filling three times as fast. Arrays that are filled step by step do not use large pages: the first write
    into a large page is slow.
    """
    if _madvise is None or not array.is_cpu or array.nbytes < 2 * _LARGE_PAGE:
        return
    start = array.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    # The end is rounded up, because `allocate_zeros` reserves whole large pages. Errors of this advice are ignored.
    stop = -(-(array.data_ptr() + array.nbytes) // _LARGE_PAGE) * _LARGE_PAGE
    _madvise(start, stop - start, mmap.MADV_HUGEPAGE)


def unwritten_bytes() -> int:
    """Return a lower bound of the bytes that arrays of `allocate_zeros` still need until all pages are written."""
    reserved = sum(list(_mapping_bytes.values()))
    return max(reserved - resident_bytes(), 0) if reserved else 0


def require_persistent_memory(where: str, remedy: str, error_class: type[Exception] = SchemaError) -> None:
    """Raise an error of this class if the platform supports neither shared nor disk memory."""
    if not supports_persistent_memory():
        got = sys.platform if sys.platform != "linux" else "no native core"
        raise error_class(explain(where, "Linux and relive's native core", got, remedy))


def supports_persistent_memory() -> bool:
    """Whether the platform supports shared and disk memory."""
    return sys.platform == "linux" and kernels.supports_process_locks()


_UNCHECKED_BYTES = 1 << 30
"""Maximum bytes of a request that `require_host_memory` grants without reading the free memory."""


def available_host_bytes() -> int | None:
    """Return the free bytes of host memory; None where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        # A missing file, or a text instead of a number, means that the process has no memory limit of its own.
        return free_bytes
    return min(free_bytes, limit)


def resident_bytes() -> int:
    """Return the resident bytes of this process; a huge number where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 1 << 62


def require_host_memory(nbytes: int, where: str, remedy: str) -> None:
    """Raise a MemoryError if the host has fewer free bytes: the system would grant them and kill the process later."""
    if nbytes > _UNCHECKED_BYTES:
        _require_free(nbytes, available_host_bytes(), where, remedy, _HOST_MEMORY)


def _require_free(nbytes: int, free_bytes: int | None, where: str, remedy: str, free_space: str) -> None:
    if free_bytes is not None and nbytes > free_bytes:
        expected = f"at most {_format_bytes(free_bytes)}, {free_space}"
        raise MemoryError(explain(where, expected, _format_bytes(nbytes), remedy))


def _format_bytes(nbytes: int) -> str:
    if nbytes >= 1 << 90:
        return "more than any machine has"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 24 else f"{nbytes:,} bytes"


def make_stream_lock(device: torch.device) -> AbstractContextManager[None]:
    """Return a re-entrant lock that also orders the work of its holders on a CUDA device.

    A holder on another stream makes its stream wait for the stream of the last holder; the host does not wait. During
    graph capture a stream must not wait for others: `torch.cuda.graph` has synchronised before.
    """
    last_stream: Any = None

    def wait_for_last_stream() -> None:
        nonlocal last_stream
        stream = torch.cuda.current_stream(device)
        if stream == last_stream:
            return
        # `is_current_stream_capturing` has no device argument, so the device is made current.
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return
        if last_stream is not None:
            stream.wait_stream(last_stream)
        last_stream = stream

    return kernels.make_guarded_lock(wait_for_last_stream)
