"""Rows on any device, written and read by torch ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from relive.errors import explain
from relive.fields.conversion import as_numpy_if_cpu
from relive.fields.invariants import require, require_all
from relive.kernels.priority import PriorityTree, priority_tree
from relive.kernels.reader import Reader, reader
from relive.randomness import Randomness
from relive.replay import composed
from relive.replay.chains import Chains, Counter, of_stored
from relive.replay.frames import rebuilt
from relive.replay.invariants import check_kernels
from relive.replay.offset_plan import OffsetPlan
from relive.replay.offset_reading import windowed
from relive.replay.ring import MOST_IDS, MOST_ROWS, TRANSITION
from relive.replay.row_memory import RowMemory
from relive.replay.shares import RunningShares
from relive.replay.store import Leaves, Touched
from relive.replay.torch_writer import Changes, TorchWriter


class TorchStore:
    """A `ReplayStore` that never waits for its device, but for `len`, `stored` and `check`.

    Tables of all slots are kept where computing their entries for a batch would be several launches.
    """

    fuses = has_neighbours = False

    def __init__(self, memory: RowMemory) -> None:
        self.memory, self.schema, self.device = memory, memory.schema, memory.device
        self.num_envs, self.keeps_next = memory.ring.num_envs, memory.keeps_next
        self._waits = memory.device.type == "cpu"
        """Looking at a result holds nobody up."""
        self.counter = Counter(is_on=self._waits)
        """How the steps that were written are joined."""
        self.is_empty = True
        """Nothing was written since the last clear: what the host knows without asking the device."""
        self._counted = as_numpy_if_cpu(memory.ring.count)
        self._readers: dict[Any, Reader] = {}
        self._changes: Changes = []
        self._shares = RunningShares(memory.ring, keeps=True)
        self._row_ids: torch.Tensor | None = None
        """The ids of the transitions at all flat slots [S·N], -1 where there is none."""
        self._next_slots: torch.Tensor | None = None
        """The following slot of each one; the ring's shape says it all."""
        self._tree: PriorityTree | None = None
        self._rows_left = MOST_IDS // self.num_envs
        """How many rows an environment can be given yet, at least."""

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None
    ) -> str | None:
        count = 1 if steps is None else steps
        if self._rows_left < MOST_ROWS * count:
            self._rows_left = self.memory.ring.require_rows_left(count)
            self._row_ids = None
        leaves, nexts = self.memory.conformed(leaves, nexts, envs, steps)
        writer = TorchWriter(self.memory, leaves, nexts, envs, steps is not None)
        coming = self.counter.seen + writer.chains() if self.counter.is_on else self.counter.seen
        doubt = self.counter.doubt(coming)
        if doubt is not None:
            return doubt
        self._shares.forget()
        self._changes = writer.write()
        self.counter.seen = coming
        self._renew_row_ids()
        self.is_empty = False
        self._rows_left -= MOST_ROWS * count
        return None

    def chains(self) -> Chains:
        """How the steps that were written here are joined."""
        return self.counter.seen

    def keep_touched(self) -> None: ...

    def touched(self) -> Touched:
        return torch.cat([slots for slots, _ in self._changes]), torch.cat([which for _, which in self._changes])

    def cut(self, envs: torch.Tensor | None) -> None:
        self._shares.forget()
        self.memory.ring.cut(envs)

    def clear(self) -> None:
        self.memory.ring.clear()
        self._forget_tables()
        self.is_empty = True

    def found(self) -> None:
        self._forget_tables()
        self.is_empty = not bool((self.memory.ring.head > self.memory.ring.floor).any())
        self._rows_left = self.memory.ring.rows_left()

    def doubts(self) -> Iterator[str]:
        if not self.counter.is_on and self.memory.has_values:
            chains = of_stored(self.memory)
            while (doubt := self.counter.doubt(chains)) is not None:
                yield doubt

    def _forget_tables(self) -> None:
        self._shares.forget()
        self._row_ids = None

    def _renew_row_ids(self) -> None:
        if self._row_ids is not None:
            ring, (slots, _) = self.memory.ring, self.touched()
            self._row_ids[slots] = torch.where(ring.kind_at(slots) == TRANSITION, ring.id_of(slots), -1)

    def _known_ids(self) -> torch.Tensor:
        if self._row_ids is None:
            self._row_ids = self.memory.ring.ids()
        return self._row_ids

    # Drawing

    def __len__(self) -> int:
        return int(self._counted.sum())

    @property
    def maybe_empty(self) -> bool:
        return not len(self) if self._waits else self.is_empty

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        return self._shares.draw(count, random)

    def draw_and_read(self, *_: Any, **__: Any) -> None:
        """Not in one go."""

    def tree(self) -> PriorityTree:
        if self._tree is None:
            self._tree = priority_tree(self.memory.ring.kind.numel() + 1, self.device, self.memory.room)
        return self._tree

    def mark(self, mass: float | torch.Tensor) -> None:
        slots, changed = self.touched()
        assert changed is not None
        # A tensor: between two numbers torch would choose float32, where 1e308 and 1e-308 are none.
        mass = torch.as_tensor(mass, dtype=torch.float64, device=slots.device)
        mass = torch.where(self.memory.ring.kind_at(slots) == TRANSITION, mass, 0.0)
        # Writes to the leaf after all slots are writes to nowhere, and need no synchronisation.
        nowhere = self.memory.ring.kind.numel()
        self.tree().set(torch.where(changed, slots, nowhere), torch.where(changed, mass, 0.0))

    # Reading

    def transitions(self, slots: torch.Tensor) -> Leaves:
        memory = self.memory
        leaves = composed.named(memory, self.take(slots)) | composed.named_next(memory, self.take_next(slots))
        return leaves | {("index",): self._known_ids().index_select(0, slots)}

    def n_steps(self, slots: torch.Tensor, n: int, gamma: float) -> Leaves:
        return composed.n_steps(self, slots, n, gamma)

    def sequences(self, slots: torch.Tensor, before: int, after: int, cross: bool) -> Leaves:
        return composed.sequences(self, slots, before, after, cross)

    def windowed(self, slots: torch.Tensor, plan: OffsetPlan) -> Leaves:
        return windowed(self, slots, plan, self._known_ids().index_select(0, slots))

    def windows(
        self, slots: torch.Tensor, before: int, after: int, *, cross: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        windows = self.memory.ring.windows(slots, before, after, cross)
        return windows, self.memory.ring.first.view(-1)[windows.clamp(min=0)] & (windows >= 0)

    def take(
        self, slots: torch.Tensor, leaves: Sequence[int] | None = None, *, padded: bool = False
    ) -> list[torch.Tensor]:
        which, stacked = range(len(self.memory.leaves)) if leaves is None else leaves, self.memory.stacked
        whole = tuple(i for i in which if i not in stacked)
        found = self._reader(self.memory.leaves, whole).take(slots, 0, len(slots), padded)
        if len(whole) == len(which):
            return found
        read = dict(zip(whole, found, strict=True))
        return [read[i] if i in read else rebuilt(self.memory, i, slots) for i in which]

    def take_next(self, slots: torch.Tensor, *, padded: bool = False) -> list[torch.Tensor]:
        if not self.keeps_next:
            return self.take(self._following(slots, padded), self.memory.observed, padded=padded)
        every = tuple(range(len(self.memory.observed)))
        return self._reader(self.memory.next_leaves, every).take(slots, 0, len(slots), padded)

    def _following(self, slots: torch.Tensor, padded: bool) -> torch.Tensor:
        if padded:
            return torch.where(slots < 0, slots, self.memory.ring.after(slots))
        if self._next_slots is None:
            self._next_slots = self.memory.ring.following()
        return self._next_slots.index_select(0, slots)

    def _reader(self, source: tuple[torch.Tensor, ...], which: tuple[int, ...]) -> Reader:
        key = (source is self.memory.leaves, which)
        if key not in self._readers:
            self._readers[key] = reader([source[i] for i in which], 2, self.memory.ring.kind.numel())
        return self._readers[key]

    def ahead(self, slots: torch.Tensor) -> torch.Tensor:
        return self.memory.ring.ahead(slots)

    def preceding(self, slots: torch.Tensor) -> torch.Tensor:
        return self.memory.ring.preceding(slots)

    def later(self, slots: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return self.memory.ring.after(slots, steps)

    # Naming

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        return self.memory.ring.id_of(slots)

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        at = ids % self.memory.ring.kind.numel()
        slots = at.masked_fill(self._known_ids().index_select(0, at) != ids, -1)
        # Elsewhere than on the host an id is taken on trust: looking would be a synchronisation.
        if self._waits and ((slots.numpy() < 0) | (ids.numpy() < 0)).any():
            _, never = self.memory.ring.locate(ids)
            if never.any():
                wrong = int(never.nonzero()[0])
                remedy = "Pass ids from batch['index']."
                raise IndexError(explain(f"index[{wrong}]", "the id of a stored transition", int(ids[wrong]), remedy))
        return slots

    def stored(self) -> torch.Tensor:
        return self.memory.ring.transitions()

    @property
    def heads(self) -> torch.Tensor:
        return self.memory.ring.head

    # Verifying

    def check_bytes(self) -> None: ...

    def check(self) -> None:
        self.memory.check()
        if not self.memory.has_values:
            return
        ring = self.memory.ring
        written = bool((ring.head > ring.floor).any())
        require(self.is_empty != written, "is_empty", f"{not written}, as the heads show", self.is_empty)
        check_kernels(self)
        self._shares.check()
        if self._row_ids is not None:
            require_all(self._row_ids == ring.ids(), "ids of slots", "the ids of the rows", self._row_ids)
