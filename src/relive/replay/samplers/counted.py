"""Any sampler, with a count of how often each stored row was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from relive.errors import SchemaError, explain
from relive.fields.invariants import require, require_all
from relive.randomness import Randomness
from relive.replay.ring import TRANSITION
from relive.replay.samplers.protocol import Drawn, Draws, Sampler, started
from relive.replay.samplers.uniform import Uniform
from relive.replay.store import ReplayStore


@dataclass(frozen=True)
class Counted:
    """Draws as `sampler` does and counts the draws of every row, for `relive.inspect` to show how rows are reused.

    A row's count begins at 0 when it is stored and goes when it is overwritten. It costs eight bytes a row, one
    addition a drawn row and one write a stored row; other samplers count nothing.

    Args:
        sampler: the sampler that chooses the rows.

    >>> from relive import Prioritized, ReplayBuffer
    >>> replay = ReplayBuffer(100, obs=2, action=(), sampler=Counted(Prioritized()))
    """

    sampler: Sampler = field(default_factory=Uniform)

    def __post_init__(self) -> None:
        if isinstance(self.sampler, Counted) or not hasattr(self.sampler, "start"):
            remedy = "Pass the sampler that chooses rows."
            raise SchemaError(explain("Counted", "a sampler whose draws are counted", repr(self.sampler), remedy))

    def start(self, store: ReplayStore, random: Randomness) -> _Run:
        return _Run(started(self.sampler, store, random), store)


class _Run(Draws):
    wants_touched = True
    beside_rows = True

    def __init__(self, inner: Draws, store: ReplayStore) -> None:
        self._inner, self._store = inner, store
        self.takes_priorities, self.takes_ids, self.update = inner.takes_priorities, inner.takes_ids, inner.update
        self.faults = inner.faults
        self.atomic_draws, self.weighs = inner.atomic_draws, inner.weighs
        self._kind = store.memory.ring.kind.view(-1)
        self._counts = store.memory.allocator.allocate("sampler.drawn", self._kind.shape, torch.int64)
        self._last = torch.empty(0, dtype=torch.int64, device=store.device)
        """What the last draw chose, in case it is taken back."""
        self._number = 0

    def draw(self, count: int, *weight: torch.Tensor) -> Drawn:
        drawn = self._inner.draw(count, *weight)
        self._last = drawn.slots
        self._add(1)
        self._number += 1  # not before: what was not counted is not taken back
        return drawn

    def _add(self, times: int) -> None:
        self._counts.index_add_(0, self._last, torch.full_like(self._last, times))

    def snapshot(self) -> tuple[Any, int]:
        return self._inner.snapshot(), self._number

    def restore(self, snapshot: tuple[Any, int]) -> None:
        inner, number = snapshot
        self._inner.restore(inner)
        if self._number == number + 1:
            self._add(-1)
            self._number = number

    def written(self) -> None:
        slots, changed = self._store.touched()
        if changed is None:
            self._counts[slots] = 0
        else:  # a slot may come twice, changed and not
            self._counts.scatter_reduce_(0, slots, (~changed).long(), "prod")
        if self._inner.wants_touched:
            self._inner.written()

    def mended(self) -> None:
        self._counts *= (self._kind == TRANSITION).long()
        self._inner.mended()

    def cleared(self) -> None:
        self._counts.zero_()
        self._inner.cleared()

    def state(self) -> dict[str, torch.Tensor]:
        return {"drawn": self._counts, **self._inner.state()}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        drawn = saved["drawn"]
        if drawn.shape != self._counts.shape or bool((drawn < 0).any()):
            got = f"shape {tuple(drawn.shape)} with minimum {drawn.min() if drawn.numel() else None}"
            raise ValueError(f"counts of draws: expected {len(self._counts)} numbers of at least 0, got {got}")
        self._inner.load_state({name: tensor for name, tensor in saved.items() if name != "drawn"})
        self._counts.copy_(drawn)

    def check(self) -> None:
        """Only transitions have been drawn."""
        require(len(self._counts) == len(self._kind), "counts of draws", len(self._kind), len(self._counts))
        right = (self._counts == 0) | ((self._kind == TRANSITION) & (self._counts > 0))
        require_all(right, "count of draws", "0, or more for a transition", self._counts)
        self._inner.check()
