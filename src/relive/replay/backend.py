"""The interface between a replay buffer and the kernels of its device: one backend per device, chosen at construction.

The words: a *row* is a step of one environment, numbered for ever; a *slot* is where it is kept, and its flat number is
slot · num_envs + environment; an *id* is what a batch's "index" holds, row · num_envs + environment; a *leaf* is one
tensor of the schema; a *field* is what the user declared. -1 is no slot; readers that may be given it read zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from relive.errors import explain
from relive.kernels.priority import PriorityTree
from relive.kernels.reader import Reader, reader
from relive.replay.invariants import check_kernels
from relive.replay.read_plan import PlanReader, ReadPlan
from relive.replay.row_storage import RowStorage
from relive.replay.torch_reader import TorchReader
from relive.rng import Randomness

Touched = tuple[torch.Tensor, torch.Tensor | None]
"""Slots, and which of them really changed (None: all)."""


class Backend:
    """Writes, draws and reads the rows of a replay buffer; samplers get it as their `storage`.

    Everything is on `device`. Backends of other devices than the host never wait for it, except where that is said.
    """

    def __init__(self, rows: RowStorage) -> None:
        self.rows = rows
        """The tensors of the rows."""
        self.ring = rows.ring
        """The kind of row in each slot, and the arithmetic of slots and ids."""
        self.allocator, self.schema, self.device = rows.allocator, rows.schema, rows.device
        self.num_envs = rows.ring.num_envs
        self.keeps_next = rows.keeps_next
        """Next observations are stored with the rows, which have no order: only transitions can be read."""
        self.warning: str | None = None
        """A message about steps that look like a mistake, which was not issued yet; None without one."""
        self._readers: dict[Any, Reader] = {}
        self._is_valid: Callable[[], bool] | None = None
        """The backend's own check of all invariants of the ring, which finds violations but does not explain them."""

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Write a step, or a block of `steps` steps in time order, of all environments or of `envs`: all or nothing.

        `then` is the rest of the change, as in `kernels.complete`: a signal interrupts neither without the other.
        """
        raise NotImplementedError

    def observe(self, counters: Any) -> bool:
        """Let native counters count every step in the call that writes it; False if this backend cannot."""
        return False

    def rewrite(self, slots: torch.Tensor, leaves: dict[int, torch.Tensor]) -> None:
        """Write K > 0 rows of mutable leaves to slots [K]: none for -1, the last for a slot that comes twice."""
        raise NotImplementedError

    def keep_touched(self) -> None:
        """Let `touched` tell the slots of the last write from now on."""

    def touched(self) -> Touched:
        """The slots that the last write made transitions or took away, in the order it happened."""
        raise NotImplementedError

    def cut(self, envs: torch.Tensor | None, then: Callable[[], None]) -> None:
        """The current episodes of these environments (or of all) were abandoned. `then` is the rest of the change."""
        self.ring.cut(envs, then)

    def clear(self) -> None:
        """Forget every row; doing it twice leads to the same."""
        self.ring.clear()

    def refresh(self) -> None:
        """Forget what the host knows of the rows: something else than `write` has put others here."""

    def recover(self) -> None:
        """A process died that had the lock: make a ring again of what it left."""
        self.ring.recover()

    def doubts(self) -> Iterator[str]:
        """Messages about stored rows that look like a mistake and could not be told while they were written."""
        return iter(())

    # Drawing

    def __len__(self) -> int:
        """How many rows may be drawn; waits."""
        raise NotImplementedError

    @property
    def maybe_empty(self) -> bool:
        """Whether no row may be drawn, as far as the host knows."""
        return not len(self)

    def random(self, seed: int | None) -> Any:
        """A stream of random numbers for `draw`."""
        return Randomness(seed)

    def draw(self, count: int, random: Any) -> torch.Tensor:
        """Slots of rows, uniformly and with replacement [count]; the caller has checked that there are any."""
        raise NotImplementedError

    def tree(self) -> PriorityTree:
        """The priorities of slots, all zero at first, with one leaf more than there are slots."""
        raise NotImplementedError

    def mark(self, mass: float | torch.Tensor) -> None:
        """Give the slots that the last write touched this priority in the tree, or zero where no transition is left."""
        raise NotImplementedError

    # Reading

    def reader(self, plan: ReadPlan) -> PlanReader:
        """A reader of batches of this plan; making one takes longer than reading a batch."""
        return TorchReader(self, plan)

    def take(
        self, slots: torch.Tensor, leaves: Sequence[int] | None = None, *, padded: bool = False
    ) -> list[torch.Tensor]:
        """All leaves at slots, in the schema's order, or the leaves `leaves`; `padded`: a slot may be -1."""
        which, stacked = range(len(self.rows.leaves)) if leaves is None else leaves, self.rows.stacked
        whole = tuple(i for i in which if i not in stacked)
        found = self._take(self.rows.leaves, whole, slots, padded)
        if len(whole) == len(which):
            return found
        read = dict(zip(whole, found, strict=True))
        return [read[i] if i in read else self._stack(slots, i) for i in which]

    def take_stored_next(self, slots: torch.Tensor, leaves: Sequence[int]) -> list[torch.Tensor]:
        """Leaves of next observations that have tensors of their own."""
        which = tuple(self.rows.observed.index(leaf) for leaf in leaves)
        return self._take(self.rows.next_leaves, which, slots, padded=False)

    def next_and_ids(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots and those of the observations that they led to [2, B], if rows are in order; the rows' ids."""
        at = slots.unsqueeze(0) if self.keeps_next else torch.stack([slots, self.ring.after(slots)])
        return at, self.ids(slots)

    def _take(
        self, source: tuple[torch.Tensor, ...], which: tuple[int, ...], slots: torch.Tensor, padded: bool
    ) -> list[torch.Tensor]:
        key = (source is self.rows.leaves, which)
        found = self._readers.get(key)
        if found is None:
            found = self._readers[key] = reader([source[i] for i in which], 2, self.ring.size)
        return found.take(slots, 0, len(slots), padded)

    def _stack(self, slots: torch.Tensor, leaf: int) -> torch.Tensor:
        """The frame stacks at flat slots, rebuilt from single frames."""
        return self.rows.rebuild_stacks(leaf, slots)

    def preceding(self, slots: torch.Tensor) -> torch.Tensor:
        """How many transitions of the same episode precede each row."""
        return self.ring.preceding(slots)

    def ahead(self, slots: torch.Tensor) -> torch.Tensor:
        """How many more transitions of the same episode follow each row."""
        return self.ring.ahead(slots)

    # Naming

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        """The ids of the rows at slots."""
        return self.ring.id_of(slots)

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of row ids; -1 for rows that can no longer be drawn, an IndexError for ids never given."""
        raise NotImplementedError

    def stored(self) -> torch.Tensor:
        """The slots of all rows that may be drawn; waits."""
        return self.ring.transitions()

    @property
    def num_slots(self) -> int:
        """The number of flat slots: one more than the largest."""
        return self.ring.size

    @property
    def heads(self) -> torch.Tensor:
        """The row that each environment writes next [N], sharing memory."""
        return self.ring.head

    def allocate(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for every slot [num_slots], kept where the rows are: processes that share these share it."""
        return self.allocator.allocate(f"sampler.{name}", (self.num_slots,), dtype)

    # Verifying

    def check(self) -> None:
        """Verify every invariant of the rows and of what is known about them; changes nothing."""
        self.rows.check(self._is_valid)
        if self.rows.has_values:
            check_kernels(self)

    def check_bytes(self) -> None:
        """Verify that every row is what was written, where checksums are kept."""


def never_issued(ids: torch.Tensor, place: int) -> IndexError:
    """The error for an id that no row has ever had."""
    remedy = "Pass ids from batch['index']."
    if int(ids[place]) == -1:
        remedy = "-1 pads batch['step_index']: pass it in its shape [B, L], or select by batch['mask']."
    return IndexError(explain(f"index[{place}]", "the id of a stored transition", int(ids[place]), remedy))
