"""What the stores of all backends do alike: they read leaves at slots of a memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relive.errors import explain
from relive.kernels.reader import Reader, reader
from relive.randomness import Randomness
from relive.replay.frames import rebuilt
from relive.replay.row_memory import RowMemory


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

    def _take_kept_next(self, slots: torch.Tensor, padded: bool) -> list[torch.Tensor]:
        """`take_next` where next observations have tensors of their own."""
        return self._taken(self.memory.next_leaves, tuple(range(len(self.memory.observed))), slots, padded)

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
    return IndexError(explain(f"index[{place}]", "the id of a stored transition", int(ids[place]), remedy))
