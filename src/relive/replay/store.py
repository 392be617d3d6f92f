"""Where a replay buffer keeps its rows: one store per backend, which is chosen when the buffer is made.

The words: a *row* is a step of one environment, numbered for ever; a *slot* is where it is kept, and its flat number is
slot · num_envs + environment; an *id* is what a batch's "index" holds, row · num_envs + environment; a *leaf* is one
tensor of the schema; a *field* is what the user declared. -1 is no slot; readers that may be given it read zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from relive import lazy
from relive.kernels.priority import PriorityTree
from relive.rng import Randomness
from relive.schema.fields import Path, Schema

if TYPE_CHECKING:
    from relive.replay.read_plan import ReadPlan
    from relive.replay.row_memory import RowMemory
    from relive.replay.samplers import Sampler

Leaves = dict[Path, torch.Tensor]
"""What a batch consists of, in its order."""

Touched = tuple[torch.Tensor, torch.Tensor | None]
"""Slots, and which of them really changed (None: all)."""


class PlanReader:
    """Reads batches of one plan from one store. Only `read` is needed; other methods say None where they cannot."""

    plan: ReadPlan
    copies_unlocked = False
    """It has `sample_unlocked`: other processes write here, and would wait while rows are copied."""

    def read(self, slots: torch.Tensor) -> Leaves:
        """The batch of the rows at these slots, in fresh tensors."""
        raise NotImplementedError

    def sample(self, count: int, random: Any) -> lazy.TensorDict | None:
        """A batch of rows that are drawn uniformly, in one call."""

    def reserve(self, count: int, out: lazy.TensorDict | None, weighs: bool) -> Any:
        """Memory for a batch, that of `out` if it is given: what `fill` takes."""

    def fill(
        self, reserved: Any, slots: torch.Tensor, weight: torch.Tensor | None, out: lazy.TensorDict | None
    ) -> lazy.TensorDict:
        """The batch of the rows at these slots in reserved memory; cannot fail."""
        raise NotImplementedError

    def sample_unlocked(
        self, count: int, sampler: Sampler, lock: AbstractContextManager[Any]
    ) -> lazy.TensorDict | None:
        """A batch that `sampler` draws under the lock, copied without it; None if a row was overwritten meanwhile."""


class ReplayStore(Protocol):
    """The rows of a replay buffer: written whole or not at all, drawn, and read by flat slots.

    Everything is on `device`. Stores of other devices than the host never wait for it, except where that is said.
    """

    memory: RowMemory
    """The tensors, for whoever saves or verifies them."""
    schema: Schema
    device: torch.device
    num_envs: int
    keeps_next: bool
    """Rows are in no order: only transitions can be read."""

    warning: str | None
    """A message about steps that look like a mistake, which was not issued yet; None without one."""

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Write a step, or a block of `steps` steps in time order, of all environments or of `envs`.

        `then` is the rest of the change, as in `kernels.complete`: a signal interrupts neither without the other.
        """
        ...

    def observe(self, counters: Any) -> bool:
        """Let native counters count every step in the call that writes it; False if this store cannot."""
        ...

    def put(self, slots: torch.Tensor, leaves: dict[int, torch.Tensor]) -> None:
        """Write K > 0 rows of mutable leaves to slots [K]: none for -1, the last for a slot that comes twice."""
        ...

    def keep_touched(self) -> None:
        """Let `touched` tell the slots of the last write from now on."""
        ...

    def touched(self) -> Touched:
        """The slots that the last write made transitions or took away, in the order it happened."""
        ...

    def cut(self, envs: torch.Tensor | None, then: Callable[[], None]) -> None:
        """The current episodes of these environments (or of all) were abandoned. `then` is the rest of the change."""
        ...

    def clear(self) -> None:
        """Forget every row; doing it twice leads to the same."""
        ...

    def found(self) -> None:
        """Know what the host knows of rows that something else than `write` has put here."""
        ...

    def doubts(self) -> Iterator[str]:
        """What looks like a mistake in the stored rows and could not be told while they were written."""
        ...

    # Drawing

    def __len__(self) -> int:
        """How many rows may be drawn; waits."""
        ...

    @property
    def maybe_empty(self) -> bool:
        """Whether no row may be drawn, as far as the host knows."""
        ...

    def random(self, seed: int | None) -> Randomness:
        """A stream of draws from this store: what `draw` is given."""
        ...

    def draw(self, count: int, random: Any) -> torch.Tensor:
        """Slots of rows, uniformly and with replacement [count]; the caller has checked that there are any."""
        ...

    def tree(self) -> PriorityTree:
        """The priorities of slots, all zero at first, with one leaf more than there are slots."""
        ...

    def mark(self, mass: float | torch.Tensor) -> None:
        """Give the slots that the last write touched this priority in the tree, or zero where no transition is left."""
        ...

    # Reading

    def reader(self, plan: ReadPlan) -> PlanReader:
        """A reader of batches of this plan; making one takes longer than reading a batch."""
        ...

    def take(
        self, slots: torch.Tensor, leaves: Sequence[int] | None = None, *, padded: bool = False
    ) -> list[torch.Tensor]:
        """All leaves at slots, in the schema's order, or the leaves `leaves`; `padded`: a slot may be -1."""
        ...

    def ahead(self, slots: torch.Tensor) -> torch.Tensor:
        """How many more transitions of the same episode follow each row."""
        ...

    def preceding(self, slots: torch.Tensor) -> torch.Tensor:
        """How many transitions of the same episode precede each row."""
        ...

    def later(self, slots: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """The slots of the rows so many steps later."""
        ...

    # Naming

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        """The ids of the rows at slots."""
        ...

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of row ids; -1 for rows that can no longer be drawn, an IndexError for ids never given."""
        ...

    def stored(self) -> torch.Tensor:
        """The slots of all rows that may be drawn; waits."""
        ...

    @property
    def num_slots(self) -> int:
        """The number of flat slots: one more than the largest."""
        ...

    @property
    def heads(self) -> torch.Tensor:
        """The row that each environment writes next [N], sharing memory."""
        ...

    # Verifying

    def check(self) -> None:
        """Verify every invariant of the rows and of what is known about them; changes nothing."""
        ...

    def check_bytes(self) -> None:
        """Verify that every row is what was written, where checksums are kept."""
        ...


def durable(store: ReplayStore) -> DurableStore:
    """The store of a memory that outlives this process, which no other store can be over."""
    return cast("DurableStore", store)


class DurableStore(ReplayStore, Protocol):
    """A store whose memory outlives the process that writes it, or has other processes beside it."""

    def mend(self) -> None:
        """A process died that had the lock: make a ring again of what it left."""
        ...

    def torn_rows(self) -> torch.Tensor:
        """Which slots [S, N] hold rows whose mutable leaves are not what was written."""
        ...

    def forget_write_back(self) -> None:
        """What a process that died was writing again is not to be completed."""
        ...

    def seal(self) -> None:
        """Take every row for what was written."""
        ...

    def broken_rows(self, since: torch.Tensor, until: torch.Tensor) -> torch.Tensor:
        """Which slots [S, N] hold rows, from `since` [N] on and before `until`, that are not what was written."""
        ...

    def write_behind(self, file: int, offset: int, nbytes: int) -> None:
        """Let the disk begin to write a piece of a file, without waiting for it."""
        ...
