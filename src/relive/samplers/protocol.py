"""What a sampler is: a description that each buffer starts a run of its own from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from relive.randomness import Randomness
from relive.replay_storage import ReplayStorage


class Drawn(NamedTuple):
    """Rows chosen for a batch."""

    slots: torch.Tensor
    """Flat slots of transitions, int64 [B]."""
    weight: torch.Tensor | None = None
    """Importance weights in (0, 1], float32 [B], where the sampler is not uniform."""


class Draws(Protocol):
    """A sampler at work on one buffer.

    What it keeps beside the rows it may verify in a method `check() -> None`, which raises an InvariantError. A method
    `mended() -> None` is told that rows have come or gone unsaid: a process died that wrote in the same memory.
    """

    def draw(self, count: int) -> Drawn:
        """Choose `count` rows; the buffer has checked that there are any."""
        ...

    def written(self) -> None:
        """Slots have become transitions, or have stopped being some: `storage.touched()` says which."""
        ...

    def cleared(self) -> None:
        """The buffer has forgotten every row."""
        ...

    def snapshot(self) -> Any:
        """What draws change, but for the generator."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot: the draws since have not happened."""
        ...

    def saved(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint needs to go on from here, but for the generator; may share memory."""
        ...

    def resume(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from what was saved; the rows are there already. A ValueError says what cannot be."""
        ...

    wants_touched: bool
    """Whether `written` is to be called."""


class Sampler(Protocol):
    """The description: a small frozen object that says how rows are chosen."""

    def start(self, storage: ReplayStorage, random: Randomness) -> Draws:
        """A run on this storage, with draws of its own."""
        ...
