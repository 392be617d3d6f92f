"""Rows on any device, written and read by torch ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from relive.kernels import complete
from relive.kernels.priority import PriorityTree, priority_tree
from relive.replay.chains import Chains, Counter, of_stored
from relive.replay.invariants import check_kernels
from relive.replay.queues import Queues
from relive.replay.ring import MOST_IDS, MOST_ROWS, NO_ID, TRANSITION
from relive.replay.row_memory import RowMemory
from relive.replay.row_store import RowStore, never_issued
from relive.replay.store import Touched
from relive.replay.torch_write_back import rewriting
from relive.replay.torch_writer import TorchWriter, Written
from relive.rng import Randomness
from relive.schema.conversion import as_numpy_if_cpu
from relive.schema.invariants import require, require_all


class TorchStore(RowStore):
    """A `ReplayStore` that never waits for its device, but for `len`, `stored` and `check`.

    Tables of all slots are kept where computing their entries for a batch would be several launches. Each is made when
    it is first needed, and then kept up by writes.
    """

    def __init__(self, memory: RowMemory) -> None:
        super().__init__(memory)
        self._waits = memory.device.type == "cpu"
        """Looking at a result holds nobody up."""
        self.warning: str | None = None
        self.counter = Counter(is_on=self._waits)
        """How the steps that were written are joined."""
        self.is_empty = True
        """Nothing was written since the last clear: what the host knows without asking the device."""
        self._counted = as_numpy_if_cpu(memory.ring.count)
        self._written: list[Written] = []
        self._queues = Queues(memory.ring, in_order=not memory.keeps_next)
        self._drawn: tuple[torch.Tensor, torch.Tensor, int] | None = None
        """The slots of the last draw, and what the queues said of them."""
        self._rows: torch.Tensor | None = None
        """Slot, following slot and id [3, S·N] of the transitions at all flat slots; of others the id is `NO_ID`."""
        self._tree: PriorityTree | None = None
        self._rows_left = MOST_IDS // self.num_envs
        """How many rows an environment can be given yet, at least."""

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        count = 1 if steps is None else steps
        if self._rows_left < MOST_ROWS * count:
            self._rows_left = self.memory.ring.require_rows_left(count)
            self._rows = None
        leaves, nexts = self.memory.conformed(leaves, nexts, envs, steps)
        writer = TorchWriter(self.memory, leaves, nexts, envs, steps is not None, counts=self.counter.is_on)
        self._rows_left -= MOST_ROWS * count
        complete(partial(self._write, writer, self.counter.seen, then))
        if writer.refusal is not None:
            raise writer.refusal
        if self.counter.is_on:
            self.warning = self.counter.doubt(self.counter.seen)

    def _write(self, writer: TorchWriter, seen: Chains, then: Callable[[], None] | None) -> None:
        """All of a write; after an interruption it goes on where it was."""
        has_tables, writer.has_tables = writer.has_tables, False
        self._written = writer.write()
        if writer.refusal is not None:
            return
        self._drawn, self.counter.seen, self.is_empty = None, seen + writer.counted, False
        if has_tables:
            self._queues.follow(self._written)
            self._renew_rows()
        else:  # they may have followed in part
            self._forget_tables()
        if then is not None:
            then()

    def put(self, slots: torch.Tensor, leaves: dict[int, torch.Tensor]) -> None:
        complete(rewriting(self.memory, slots, leaves))

    def chains(self) -> Chains:
        """How the steps that were written here are joined."""
        return self.counter.seen

    def keep_touched(self) -> None: ...

    def touched(self) -> Touched:
        """Every slot that a row entered or left."""
        slots = [each for step in self._written for each in (step.slots.view(-1), step.left) if each is not None]
        return slots[0] if len(slots) == 1 else torch.cat(slots), None

    def cut(self, envs: torch.Tensor | None, then: Callable[[], None]) -> None:
        self.memory.ring.cut(envs, then)

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
        self._queues.forget()
        self._rows = self._drawn = None

    def _renew_rows(self) -> None:
        if self._rows is None:
            return
        ids = self._rows[2]
        for step in self._written:
            if step.left is not None:
                ids.index_fill_(0, step.left, NO_ID)
            ids.index_fill_(0, step.slots[-1], NO_ID)
            rows = step.ids[0] if step.is_reset is None else step.ids[0].masked_fill(step.is_reset, NO_ID)
            ids.index_copy_(0, step.slots[0], rows)

    @torch.inference_mode(False)  # writes change them later, in whatever mode
    def _known_rows(self) -> torch.Tensor:
        if self._rows is None:
            slots = torch.arange(self.memory.ring.size, device=self.device)
            self._rows = torch.stack([slots, self.memory.ring.after(slots), self.memory.ring.ids()])
        return self._rows

    # Drawing

    def __len__(self) -> int:
        return int(self._counted.sum())

    @property
    def maybe_empty(self) -> bool:
        return not len(self) if self._waits else self.is_empty

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        drawn = self._queues.draw(count, random)
        slots = drawn[0]
        version = self._version_of(slots)
        self._drawn = None if version is None else (slots, drawn, version)
        return slots

    def tree(self) -> PriorityTree:
        if self._tree is None:
            self._tree = priority_tree(self.memory.ring.size + 1, self.device, self.memory.allocator)
        return self._tree

    def mark(self, mass: float | torch.Tensor) -> None:
        slots, changed = self.touched()
        # A tensor: between two numbers torch would choose float32, where 1e308 is infinite and 1e-308 is zero.
        if not isinstance(mass, torch.Tensor):
            mass = torch.full((), mass, dtype=torch.float64, device=slots.device)
        masses = mass * (self.memory.ring.kind_at(slots) == TRANSITION)
        if changed is not None:  # the leaf after all slots is nowhere
            slots, masses = torch.where(changed, slots, self.memory.ring.size), masses * changed
        self.tree().set(slots, masses)

    # Reading

    def next_and_ids(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keeps_next:
            return super().next_and_ids(slots)
        rows = self._known(slots)
        if rows is None:
            rows = self._known_rows().index_select(1, slots)
        return rows[:2], rows[2]

    def ahead(self, slots: torch.Tensor) -> torch.Tensor:
        return self.memory.ring.ahead(slots)

    def preceding(self, slots: torch.Tensor) -> torch.Tensor:
        return self.memory.ring.preceding(slots)

    # Naming

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        drawn = self._known(slots)
        return self.memory.ring.id_of(slots) if drawn is None else drawn[-1]

    def _known(self, slots: torch.Tensor) -> torch.Tensor | None:
        """What was drawn with these slots: their entries in the queues."""
        if self._drawn is None or self._drawn[0] is not slots or self._version_of(slots) != self._drawn[2]:
            return None  # a sampler may have put others in their place
        return self._drawn[1]

    @staticmethod
    def _version_of(slots: torch.Tensor) -> int | None:
        """How often slots were written to, where torch counts it."""
        return None if slots.is_inference() else slots._version

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        at = ids % self.memory.ring.size
        slots = at.masked_fill(self._known_rows()[2].index_select(0, at) != ids, -1)
        # Elsewhere than on the host an id is taken on trust: looking would be a synchronisation.
        if self._waits and ((slots.numpy() < 0) | (ids.numpy() < 0)).any():
            _, never = self.memory.ring.locate(ids)
            if never.any():
                raise never_issued(ids, int(never.nonzero()[0]))
        return slots

    # Verifying

    def check_bytes(self) -> None: ...

    def check(self) -> None:
        self.memory.check()
        if not self.memory.has_values:
            return
        ring = self.memory.ring
        written = bool((ring.head > ring.floor).any())
        self._check_is_empty(written)
        check_kernels(self)
        self._queues.check()
        if self._rows is not None:
            require_all(self._rows[2] == ring.ids(), "ids of slots", "the ids of the rows", self._rows[2])

    def _check_is_empty(self, written: bool) -> None:
        require(self.is_empty != written, "is_empty", f"{not written}, as the heads show", self.is_empty)
