"""The interface that gives a buffer its arrays, and the memory of this process."""

from __future__ import annotations

import ctypes
import math
import mmap
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
from relive.schema.conversion import device_of

if TYPE_CHECKING:
    from relive.replay.recovery import RecoverableBuffer


class Allocator:
    """Gives the arrays of one buffer by name, each once, and the lock that everybody who uses them takes.

    This is the interface; its defaults are those of memory that ends with the process.
    """

    device: torch.device
    name: str
    """The kind of memory: own, pinned, shared or disk."""
    persistent = False
    """The arrays outlive this process, which may die in the middle of a step."""
    durable = False
    """The arrays also outlive the machine's memory: rows have checksums, and `before_write` must be called."""
    reopened = False
    """Arrays come as they were left, not as zeros."""
    is_open = True
    """Not closed yet."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The array called `name`, to be written in any mode."""
        raise NotImplementedError

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        """A re-entrant lock; `recover` is called when the last holder died, before anybody else goes on."""
        raise NotImplementedError

    def recover(self, buffer: RecoverableBuffer, *, resumes: bool) -> None:
        """The buffer is complete: make whole what was reopened; `resumes`: go on with the draws of the last commit."""

    def before_write(self, steps: int) -> None:
        """Called before so many steps are written."""

    def commit(self) -> None:
        """Wait until everything is on the disk."""

    def replacing(self) -> AbstractContextManager[None]:
        """Context manager for replacing all contents: if the process dies inside, none remain."""
        return nullcontext()

    def reading_in_order(self) -> AbstractContextManager[None]:
        """Held while rows are read one after the other, not here and there."""
        return nullcontext()

    def close(self) -> None:
        """Commit, and let others have the memory."""


class LocalAllocator(Allocator):
    """Memory of this process alone, on any device."""

    def __init__(self, device: torch.device, is_pinned: bool = False) -> None:
        self.device, self._is_pinned = device, is_pinned
        self.name = "pinned" if is_pinned else "own"

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            if self.device.type == "cpu" and not self._is_pinned:
                return zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=self.device, pin_memory=self._is_pinned)

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        return stream_lock(self.device) if self.device.type == "cuda" else threading.RLock()


@dataclass(frozen=True)
class Memory:
    """A kind of memory, for `device=` of a buffer when it is more than a device.

    `Memory.pinned()`, `Memory.shared()` and `Memory.disk(path)` make one.

    Args:
        device: the torch device of the tensors.
        is_pinned: whether an accelerator can copy from it asynchronously.
        allocator: makes the allocator of one buffer, which has all of its settings but no arrays yet; None for this
            process's own memory.
        free_bytes: tells how much more can be kept there; None where the system does not tell.
        name: how it was made.
        free_of: the name of what `free_bytes` counts, for messages.

    >>> Memory.of("cpu"), Memory.shared()
    (Memory.of('cpu'), Memory.shared())
    """

    device: torch.device
    is_pinned: bool = False
    allocator: Callable[[Any], Allocator] | None = None
    free_bytes: Callable[[], int | None] | None = None
    name: str = ""
    free_of: str = "the free memory of this machine"

    @property
    def is_shared(self) -> bool:
        """Whether several processes may write there."""
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
        from relive.storage.shared import SharedAllocator  # noqa: PLC0415 (which is made of this module)

        return Memory(torch.device("cpu"), allocator=SharedAllocator.create, name="Memory.shared()")

    @staticmethod
    def disk(path: str | PathLike[str], *, commit_every: int | None = None) -> Memory:
        """Files in the folder `path`, larger than memory if need be, that are found again by the next process.

        An empty or absent folder becomes the memory of a new replay buffer; one that is there already is reopened, if
        it was made with the same settings, and `relive.load(path)` needs none. One process has it at a time.

        A process that is killed loses the step that it was writing. When the machine stops, what was added since the
        last commit is lost, and as many of the oldest rows. `ReplayBuffer.commit` and `close` commit, and so does
        adding: when `commit_every` steps were added since the last time (by default an eighth of what fits or 256 MiB,
        whichever is less), and after a minute. Linux only, with relive's native core.
        """
        from relive.storage.disk import disk_memory  # noqa: PLC0415 (which is made of this module)

        return disk_memory(path, commit_every)

    @staticmethod
    def of(device: torch.device | str | Memory) -> Memory:
        """The memory that a `device=` argument names; "cuda" names the device that is current in this thread."""
        if isinstance(device, Memory):
            return device
        named = device_of(device)
        if named.type == "cuda" and named.index is None and torch.cuda.is_available():
            # Tensors of later calls belong there too, whatever device is current then.
            named = torch.device("cuda", torch.cuda.current_device())
        return Memory(named)

    def __repr__(self) -> str:
        return self.name or ("Memory.pinned()" if self.is_pinned else f"Memory.of({str(self.device)!r})")

    def open(self, owner: Any) -> Allocator:
        """The allocator of one buffer, which has all of its settings but no arrays yet."""
        return LocalAllocator(self.device, self.is_pinned) if self.allocator is None else self.allocator(owner)

    def own(self, kind: str) -> Allocator:
        """The allocator for buffers that live in one process only; raises for shared and disk memory."""
        if self.allocator is not None:
            remedy = "Pass a torch device. Only a ReplayBuffer can be in shared or disk memory."
            raise SchemaError(explain("device", f"a torch device for a {kind}", self, remedy))
        return self.open(None)

    def require(self, nbytes: int, where: str = "capacity") -> None:
        """Refuse a size, which the argument `where` said, that cannot fit beside what other buffers may still write.

        Pages come as they are written, so too much would end in a kill much later.
        """
        if self.free_bytes is not None:
            free = self.free_bytes()
        elif self.device.type != "cpu":
            free = 1 << 62  # what a number of bytes can be
        elif (free := available_bytes()) is not None:
            free = max(free - unwritten_bytes(), 0)
        if free is not None and nbytes > free:
            expected = f"at most {in_gibibytes(free)}, {self.free_of}"
            remedy = f"Lower {where}, store frames as Stacked, or use smaller dtypes."
            raise MemoryError(explain(where, expected, in_gibibytes(nbytes), remedy))


# Arrays of this process, and in files that are mapped

_LARGE = 1 << 15
"""Bytes from which on memory is mapped, and has no pages before it is written. Torch fills more in parallel."""
_LARGE_PAGE = 1 << 21
"""Bytes of a large page; arrays of two and more get them."""
_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_reserved: dict[int, int] = {}
"""The bytes of the mappings that `zeros` made and that are still there."""


def tensor_in(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor whose bytes are the first ones of a mapping."""
    count = math.prod(shape)
    return (
        torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
        if count
        else torch.empty(shape, dtype=dtype, device="cpu")
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of this process alone, whose pages come as they are written.

    The pages are the system's small ones: the first write into a page of 2 MiB takes milliseconds where the machine is
    a virtual one, and two to three times as long per byte (see benchmarks/first_fill.py).
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        # Linux lays memory of whole large pages on their boundaries: `expect_bulk` needs them there.
        reserved = -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE if nbytes >= 2 * _LARGE_PAGE else nbytes
        memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        remedy = "Make a smaller buffer, or raise the limit of this process."
        raise MemoryError(explain("memory", in_gibibytes(nbytes), error.strerror, remedy)) from error
    _reserved[id(memory)] = nbytes
    weakref.finalize(memory, _reserved.pop, id(memory), None)
    return tensor_in(memory, shape, dtype)


def expect_bulk(array: torch.Tensor) -> None:
    """Let an array on the host, in one piece, get large pages where the system has them: all of it is written now.

    Many rows at once are written three times as fast then; nobody waits for the single one.
    """
    if _madvise is None or not array.is_cpu or array.nbytes < 2 * _LARGE_PAGE:
        return
    start = array.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(array.data_ptr() + array.nbytes) // _LARGE_PAGE) * _LARGE_PAGE  # `zeros` has reserved the whole page
    _madvise(start, stop - start, mmap.MADV_HUGEPAGE)  # no error: it is advice


def unwritten_bytes() -> int:
    """A lower bound of what the arrays of `zeros` will still take when all of their pages are written."""
    reserved = sum(list(_reserved.values()))
    return max(reserved - resident_bytes(), 0) if reserved else 0


# How much memory there is

_MUCH = 1 << 30
"""Bytes that are asked for without a look at the free memory."""


def available_bytes() -> int | None:
    """The host memory that could be used now, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no limit, or no such file
        return free
    return min(free, limit)


def resident_bytes() -> int:
    """The host memory that this process has pages of, where the system tells; else more than there can be."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 1 << 62


def require_memory(nbytes: int, where: str, remedy: str) -> None:
    """Refuse a request for more bytes than the host has: the system grants pages first, and ends the process later."""
    free = available_bytes() if nbytes > _MUCH else None
    if free is not None and nbytes > free:
        expected = f"at most {in_gibibytes(free)}, the free memory of this machine"
        raise MemoryError(explain(where, expected, in_gibibytes(nbytes), remedy))


def in_gibibytes(nbytes: int) -> str:
    """A number of bytes, of any size, for a message."""
    if nbytes >= 1 << 90:
        return "more than any machine has"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= _MUCH // 100 else f"{nbytes:,} bytes"


# The lock of a device


def stream_lock(device: torch.device) -> Any:
    """A re-entrant lock: what its holder launches comes after what earlier holders have launched.

    A holder on another stream than the last one lets its stream wait for that one, on the device; the host does not
    wait. While a graph is captured nothing of other streams may be waited for: `torch.cuda.graph` has waited before.
    """
    last: Any = None  # the stream of the last holder

    def follow() -> None:
        nonlocal last
        stream = torch.cuda.current_stream(device)
        if stream == last:
            return
        with torch.cuda.device(device):  # torch asks the current device
            if torch.cuda.is_current_stream_capturing():
                return
        if last is not None:
            stream.wait_stream(last)
        last = stream

    return kernels.guarded_lock(follow)
