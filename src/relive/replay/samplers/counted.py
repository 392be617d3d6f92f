"""A sampler that counts how often another sampler draws each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from relive.errors import SchemaError, explain, verify
from relive.replay.ring import TRANSITION
from relive.replay.samplers.sampler import Choice, Sampler
from relive.replay.samplers.uniform import Uniform
from relive.schema.invariants import verify_elements


@dataclass(unsafe_hash=True)
class Counted(Sampler):
    """Counts how often `sampler` draws each row; `relive.inspect` shows the reuse of rows.

    The count of a row starts at 0 when it is stored. Counting costs eight bytes per row, one addition per drawn row and
    one write per stored row.

    Args:
        sampler: the sampler that chooses the rows.

    >>> from relive import Prioritized, ReplayBuffer
    >>> replay = ReplayBuffer(100, obs=2, action=(), sampler=Counted(Prioritized()))
    """

    sampler: Sampler = field(default_factory=Uniform)

    # The buffer may repeat a draw of an `independent` sampler, which would count the drawn rows twice.
    independent = False
    keeps_state_in_memory = True

    def __post_init__(self) -> None:
        if isinstance(self.sampler, Counted) or not isinstance(self.sampler, Sampler):
            remedy = "Pass the sampler that chooses rows."
            raise SchemaError(explain("Counted", "a sampler whose draws are counted", repr(self.sampler), remedy))
        self.returns_weights, self.may_return_fewer = self.sampler.returns_weights, self.sampler.may_return_fewer

    def on_bind(self) -> None:
        inner: Any = self.sampler.bind(self.storage, self.rng)
        self._inner = inner
        self.updates_by_id, self.require_rows = inner.updates_by_id, inner.require_rows
        self.find_input_faults, self.optional_state = inner.find_input_faults, inner.optional_state
        self.rescale_priorities = inner.rescale_priorities
        if inner.takes_priorities:
            self.update = inner.update
        self._row_kinds = self.storage.ring.kind.view(-1)
        self._counts = self.storage.allocate("drawn", torch.int64)

    def sample(self, count: int) -> Choice:
        slots, weight = self._inner.choose(count)
        self._count_draws(slots)
        return slots, weight

    def sample_into(self, count: int, weight: torch.Tensor) -> torch.Tensor:
        slots = self._inner.sample_into(count, weight)
        self._count_draws(slots)
        return slots

    def _count_draws(self, slots: torch.Tensor) -> None:
        self._counts.index_add_(0, slots, torch.ones_like(slots))

    def after_write(self) -> None:
        slots, changed = self.storage.changed_slots()
        if changed is None:
            self._counts[slots] = 0
        else:
            # A slot may occur twice in `slots`: its count becomes 0 if `changed` is True at one of its occurrences.
            self._counts.scatter_reduce_(0, slots, (~changed).long(), "prod")
        if self._inner.follows_writes:
            self._inner.after_write()

    def on_recover(self) -> None:
        self._counts *= (self._row_kinds == TRANSITION).long()
        self._inner.on_recover()

    def on_clear(self) -> None:
        self._counts.zero_()
        self._inner.on_clear()

    def state(self) -> dict[str, torch.Tensor]:
        return {"drawn": self._counts, **self._inner.state()}

    def owned_arrays(self) -> tuple[torch.Tensor, ...]:
        # The base method would call `state` of the inner sampler, which may be of a user's class.
        return self._counts, *self._inner.owned_arrays()

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        draw_counts = saved["drawn"]
        if draw_counts.shape != self._counts.shape or bool((draw_counts < 0).any()):
            got = f"shape {tuple(draw_counts.shape)} with minimum {draw_counts.min() if draw_counts.numel() else None}"
            raise ValueError(f"counts of draws: expected {len(self._counts)} numbers of at least 0, got {got}")
        self._inner.load_state({name: tensor for name, tensor in saved.items() if name != "drawn"})
        self._counts.copy_(draw_counts)

    def check(self) -> None:
        verify(len(self._counts) == len(self._row_kinds), "counts of draws", len(self._row_kinds), len(self._counts))
        is_valid = (self._counts == 0) | ((self._row_kinds == TRANSITION) & (self._counts > 0))
        verify_elements(is_valid, "count of draws", "0, or more for a transition", self._counts)
        self._inner.check()
