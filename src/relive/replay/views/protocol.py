"""What a view is: what is read around a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from relive.errors import SchemaError, explain
from relive.replay.read_plan import ReadPlan
from relive.rng import Randomness
from relive.schema.fields import Path, Schema

if TYPE_CHECKING:
    from relive.replay.backend import Backend


class View(Protocol):
    """The description of a batch: a small frozen object.

    A view may also have a method `finish(batch, context)`, which returns the leaves [B, …] of the batch that a caller
    gets. It is given those of the plan, by path, and a `ReadContext`.
    """

    def plan(self, schema: Schema, /) -> ReadPlan:
        """What is read around each row, asked once per buffer; a SchemaError says what these fields do not allow."""
        ...


@dataclass(frozen=True)
class ReadContext:
    """What a view may ask while it finishes a batch."""

    slots: torch.Tensor
    """Flat slots of the drawn rows [B]."""
    random: Randomness
    plan: ReadPlan
    """What was read."""
    _store: Backend

    @property
    def schema(self) -> Schema:
        """The fields of the buffer."""
        return self._store.schema

    def preceding(self) -> torch.Tensor:
        """How many transitions of the same episode precede each drawn row [B]."""
        return self._store.preceding(self.slots)

    def ahead(self) -> torch.Tensor:
        """How many transitions of the same episode follow each drawn row [B]."""
        return self._store.ahead(self.slots)

    def later(self, steps: torch.Tensor) -> torch.Tensor:
        """The slots of the rows so many steps after the drawn ones."""
        return self._store.ring.after(self.slots, steps)

    def column(self, path: Path, slots: torch.Tensor) -> torch.Tensor:
        """One leaf at slots [B, …]."""
        return self._store.take(slots, (self.schema.paths.index(path),))[0]


def require_order(store: Backend, what: object) -> None:
    """Views of more than one step, and samplers of episodes, need rows in time order."""
    if store.keeps_next:
        remedy = 'Use the default next_obs="shared".'
        name = type(what).__name__
        raise SchemaError(explain(name, "rows in time order", 'a buffer with next_obs="stored"', remedy))
