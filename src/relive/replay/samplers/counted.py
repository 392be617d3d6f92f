"""Any sampler, with a count of how often each stored row was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from relive.errors import SchemaError, explain
from relive.replay.ring import TRANSITION
from relive.replay.samplers.sampler import Chosen, Sampler
from relive.replay.samplers.uniform import Uniform
from relive.schema.invariants import require, require_all


@dataclass(unsafe_hash=True)
class Counted(Sampler):
    """Draws as `sampler` does and counts the draws of every row, for `relive.inspect` to show how rows are reused.

    A row's count begins at 0 when it is stored and goes when it is overwritten. It costs eight bytes a row, one
    addition a drawn row and one write a stored row; other samplers count nothing.

    Args:
        sampler: the sampler that chooses the rows.

    >>> from relive import Prioritized, ReplayBuffer
    >>> replay = ReplayBuffer(100, obs=2, action=(), sampler=Counted(Prioritized()))
    """

    sampler: Sampler = field(default_factory=Uniform)

    independent = False  # a draw is counted
    keeps_state_in_memory = True

    def __post_init__(self) -> None:
        if isinstance(self.sampler, Counted) or not isinstance(self.sampler, Sampler):
            remedy = "Pass the sampler that chooses rows."
            raise SchemaError(explain("Counted", "a sampler whose draws are counted", repr(self.sampler), remedy))
        self.returns_weights, self.may_return_fewer = self.sampler.returns_weights, self.sampler.may_return_fewer

    def on_bind(self) -> None:
        inner: Any = self.sampler.bind(self.storage, self.rng)
        self._inner = inner
        self.updates_by_id, self.faults, self.require_rows = inner.updates_by_id, inner.faults, inner.require_rows
        self.rescale, self.optional_state = inner.rescale, inner.optional_state
        if inner.takes_priorities:
            self.update = inner.update
        self._kind = self.storage.ring.kind.view(-1)
        self._counts = self.storage.allocate("drawn", torch.int64)

    def sample(self, count: int) -> Chosen:
        slots, weight = self._inner.choose(count)
        self._count(slots)
        return slots, weight

    def sample_into(self, count: int, weight: torch.Tensor) -> torch.Tensor:
        slots = self._inner.sample_into(count, weight)
        self._count(slots)
        return slots

    def _count(self, slots: torch.Tensor) -> None:
        self._counts.index_add_(0, slots, torch.ones_like(slots))

    def after_write(self) -> None:
        slots, changed = self.storage.touched()
        if changed is None:
            self._counts[slots] = 0
        else:  # a slot may come twice, changed and not
            self._counts.scatter_reduce_(0, slots, (~changed).long(), "prod")
        if self._inner.follows_writes:
            self._inner.after_write()

    def on_recover(self) -> None:
        self._counts *= (self._kind == TRANSITION).long()
        self._inner.on_recover()

    def on_clear(self) -> None:
        self._counts.zero_()
        self._inner.on_clear()

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
        """Verify that only transitions have a count of draws."""
        require(len(self._counts) == len(self._kind), "counts of draws", len(self._kind), len(self._counts))
        right = (self._counts == 0) | ((self._kind == TRANSITION) & (self._counts > 0))
        require_all(right, "count of draws", "0, or more for a transition", self._counts)
        self._inner.check()
