"""What a view is: what is read around a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from relive.errors import SchemaError, explain
from relive.fields.schema import Path
from relive.randomness import Randomness
from relive.replay.storage import ReplayStorage

Leaves = dict[Path, torch.Tensor]
"""What a batch consists of, in its order."""


class View(Protocol):
    """The description of a batch: a small frozen object."""

    def read(self, storage: ReplayStorage, slots: torch.Tensor, random: Randomness) -> Leaves:
        """The leaves [B, …] of a batch for the drawn flat slots [B]; "index" may be left to the buffer."""
        ...


def named(storage: ReplayStorage, leaves: Sequence[torch.Tensor], columns: Sequence[int] | None = None) -> Leaves:
    """Leaves under the paths of their columns."""
    paths = storage.schema.paths
    return dict(zip(paths if columns is None else (paths[i] for i in columns), leaves, strict=True))


def named_next(storage: ReplayStorage, leaves: Sequence[torch.Tensor]) -> Leaves:
    """Leaves of next observations: `obs.camera` is `next_obs.camera`."""
    return dict(zip(storage.next_paths, leaves, strict=True))


def require_order(storage: ReplayStorage, view: object) -> None:
    """Views of more than one step need rows in time order."""
    if storage.keeps_next:
        remedy = 'Use the default next_obs="shared".'
        name = type(view).__name__
        raise SchemaError(explain(name, "rows in time order", 'a buffer with next_obs="stored"', remedy))
