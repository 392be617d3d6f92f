"""What the stores of all backends do alike: they read leaves at slots of a memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relive.errors import explain
from relive.kernels.reader import Reader, reader
from relive.replay.frames import rebuilt
from relive.replay.read_plan import ReadPlan
from relive.replay.row_memory import RowMemory
from relive.replay.store import PlanReader
from relive.replay.torch_reader import TorchReader
from relive.rng import Randomness


class RowStore:
    """The part of a `ReplayStore` that does not depend on its kernels."""

    def __init__(self, memory: RowMemory) -> None:
        self.memory, self.schema, self.device = memory, memory.schema, memory.device
        self.num_envs, self.keeps_next = memory.ring.num_envs, memory.keeps_next
        self._readers: dict[Any, Reader] = {}

    def random(self, seed: int | None) -> Any:
        return Randomness(seed)

    def observe(self, counters: Any) -> bool:
        return False

    def reader(self, plan: ReadPlan) -> PlanReader:
        return TorchReader(self, plan)

    def take(
        self, slots: torch.Tensor, leaves: Sequence[int] | None = None, *, padded: bool = False
    ) -> list[torch.Tensor]:
        which, stacked = range(len(self.memory.leaves)) if leaves is None else leaves, self.memory.stacked
        whole = tuple(i for i in which if i not in stacked)
        found = self._taken(self.memory.leaves, whole, slots, padded)
        if len(whole) == len(which):
            return found
        read = dict(zip(whole, found, strict=True))
        return [read[i] if i in read else self._stack(slots, i) for i in which]

    def take_stored_next(self, slots: torch.Tensor, leaves: Sequence[int]) -> list[torch.Tensor]:
        """Leaves of next observations that have tensors of their own."""
        which = tuple(self.memory.observed.index(leaf) for leaf in leaves)
        return self._taken(self.memory.next_leaves, which, slots, padded=False)

    def next_and_ids(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots and those of the observations that they led to [2, B], if rows are in order; the rows' ids."""
        at = slots.unsqueeze(0) if self.keeps_next else torch.stack([slots, self.memory.ring.after(slots)])
        return at, self.ids(slots)

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        return self.memory.ring.id_of(slots)

    def _taken(
        self, source: tuple[torch.Tensor, ...], which: tuple[int, ...], slots: torch.Tensor, padded: bool
    ) -> list[torch.Tensor]:
        key = (source is self.memory.leaves, which)
        found = self._readers.get(key)
        if found is None:
            found = self._readers[key] = reader([source[i] for i in which], 2, self.memory.ring.size)
        return found.take(slots, 0, len(slots), padded)

    def _stack(self, slots: torch.Tensor, leaf: int) -> torch.Tensor:
        """The frame stacks at flat slots, rebuilt from single frames."""
        return rebuilt(self.memory, leaf, slots)

    def later(self, slots: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return self.memory.ring.after(slots, steps)

    def stored(self) -> torch.Tensor:
        return self.memory.ring.transitions()

    @property
    def num_slots(self) -> int:
        return self.memory.ring.size

    @property
    def heads(self) -> torch.Tensor:
        return self.memory.ring.head


def never_issued(ids: torch.Tensor, place: int) -> IndexError:
    """What to say of an id that no row has ever had."""
    remedy = "Pass ids from batch['index']."
    if int(ids[place]) == -1:
        remedy = "-1 pads batch['step_index']: pass it in its shape [B, L], or select by batch['mask']."
    return IndexError(explain(f"index[{place}]", "the id of a stored transition", int(ids[place]), remedy))
