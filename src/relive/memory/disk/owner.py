"""What disk memory asks of the buffer that lies in it. Rows are counted for each environment, and for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from relive.memory.disk.records import Record
from relive.memory.saved import State


class Owner(Protocol):
    """The buffer of a folder, which the folder does not keep alive."""

    slots: int
    """How many rows of an environment there is room for."""
    nbytes: int
    """What all rows take together."""
    rows_of_step: int
    """How many rows of an environment one step may take, at most."""

    @property
    def most_growth(self) -> int:
        """How many bytes a commit may outgrow that of an empty buffer by."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether there is anything left to commit."""
        ...

    @property
    def head(self) -> torch.Tensor:
        """The row [N] that each environment writes next."""
        ...

    def config(self) -> dict[str, Any]:
        """How an equal, empty buffer is made."""
        ...

    def state(self) -> State:
        """Everything that is not in the arrays."""
        ...

    def marks(self) -> int:
        """A checksum of what each slot holds."""
        ...

    def recover(self, record: Record, checksum: Callable[[], int], *, resumes: bool) -> None:
        """Become what was left; `resumes`: continue with the draws of the last commit. See `DiskRoom.settle`."""
        ...

    def write_behind(self, file: int, offset: int, nbytes: int) -> None:
        """Let the disk begin to write a piece of a file, without waiting for it."""
        ...

    def seal(self) -> None:
        """Take every row for what was written."""
        ...
