"""What a view is: what is read around a row."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from relive.errors import SchemaError, explain
from relive.randomness import Randomness
from relive.replay.store import Leaves, Reading, ReplayStore


class View(Protocol):
    """The description of a batch: a small frozen object.

    A view may also have an attribute `fused`, a `Reading` that gives the same batch: a store may read it in the call
    that draws the rows. And a method `check(store)`, which refuses a buffer that cannot be read so.
    """

    def read(self, store: ReplayStore, slots: torch.Tensor, random: Randomness, /) -> Leaves:
        """The leaves [B, …] of a batch for the drawn flat slots [B]; "index" may be left to the buffer."""
        ...


def fused_of(view: Any) -> Reading | None:
    """What a store may read in place of a view; None where the view does not say."""
    return None if isinstance(view, type) else getattr(view, "fused", None)


def check_view(view: Any, store: ReplayStore) -> None:
    """Raise if a view refuses these rows."""
    if hasattr(view, "check"):
        view.check(store)


def require_order(store: ReplayStore, view: object) -> None:
    """Views of more than one step need rows in time order."""
    if store.keeps_next:
        remedy = 'Use the default next_obs="shared".'
        name = type(view).__name__
        raise SchemaError(explain(name, "rows in time order", 'a buffer with next_obs="stored"', remedy))
