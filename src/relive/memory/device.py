"""What `device=` names: a torch device, or a kind of memory that a device name cannot say."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

import torch

from relive.errors import SchemaError, explain
from relive.fields.conversion import device_of
from relive.memory.room import Heap, Room
from relive.memory.space import available_bytes, in_gibibytes


class Place(Protocol):
    """Memory that is more than this process's own."""

    def open(self, owner: Any) -> Room:
        """Room there for one buffer, which has all of its settings but no arrays yet."""
        ...

    def free_bytes(self) -> int | None:
        """How much more can be kept there, where the system tells."""
        ...


@dataclass(frozen=True)
class Memory:
    """What `device=` of a buffer names, when it is more than a device.

    `Memory.pinned()`, `Memory.shared()` and `Memory.disk(path)` make one.

    Args:
        device: the torch device of the tensors.
        is_pinned: whether an accelerator can copy from it asynchronously.
        place: where the data is, if it is not this process's own.

    >>> Memory.of("cpu"), Memory.shared()
    (Memory.of('cpu'), Memory.shared())
    """

    device: torch.device
    is_pinned: bool = False
    place: Place | None = None
    """Where the data is, if it is not this process's own."""

    @staticmethod
    def pinned() -> Memory:
        """Host memory that an accelerator can read directly. Batches are ordinary memory: see `out=` of `sample`."""
        if not torch.accelerator.is_available():
            raise SchemaError(explain("Memory.pinned", "an accelerator", "a machine without one", 'Pass device="cpu".'))
        return Memory(torch.device("cpu"), is_pinned=True)

    @staticmethod
    def shared() -> Memory:
        """Host memory that other processes of this machine use too: see `ReplayBuffer.handle`. Linux only."""
        from relive.memory.shared import Shared  # noqa: PLC0415 (which needs the kernels)

        return Memory(torch.device("cpu"), place=Shared())

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
        from relive.memory.disk.place import Disk  # noqa: PLC0415 (which knows buffers)

        return Memory(torch.device("cpu"), place=Disk.of(path, commit_every))

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

    @property
    def is_shared(self) -> bool:
        """Whether several processes may write there."""
        return getattr(self.place, "is_shared", False)

    def __repr__(self) -> str:
        if self.place is not None:
            return repr(self.place)
        return "Memory.pinned()" if self.is_pinned else f"Memory.of({str(self.device)!r})"

    def open(self, owner: Any) -> Room:
        """Room for one buffer, which has all of its settings but no arrays yet."""
        return Heap(self.device, self.is_pinned) if self.place is None else self.place.open(owner)

    def own(self, kind: str) -> Room:
        """Room for a buffer of a kind that is only kept in a process's own memory."""
        if self.place is not None:
            remedy = "Pass a torch device. Only a ReplayBuffer can be in shared or disk memory."
            raise SchemaError(explain("device", f"a torch device for a {kind}", self.place, remedy))
        return self.open(None)

    def require(self, nbytes: int, where: str = "capacity") -> None:
        """Refuse a size, which the argument `where` said, that cannot fit.

        Pages are handed out on first use, so too much would end in a kill much later.
        """
        if self.place is not None:
            free = self.place.free_bytes()
        else:  # elsewhere: what a number of bytes can be
            free = available_bytes() if self.device.type == "cpu" else 1 << 62
        if free is not None and nbytes > free:
            what = getattr(self.place, "what_is_free", "the free memory of this machine")
            expected = f"at most {in_gibibytes(free)}, {what}"
            remedy = f"Lower {where}, store frames as Stacked, or use smaller dtypes."
            raise MemoryError(explain(where, expected, in_gibibytes(nbytes), remedy))
