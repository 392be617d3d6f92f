"""What a sampler is: a description that each buffer starts a run of its own from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from relive.errors import SchemaError, explain
from relive.fields.conversion import forms
from relive.randomness import Randomness
from relive.replay.storage import ReplayStorage


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


def verify_draws(sampler: Sampler, storage: ReplayStorage, saved: Any) -> None:
    """Raise if a run of `sampler` on `storage` cannot have saved this: a run of its own goes on from it, on trial."""
    draws = sampler.start(storage, Randomness())
    own, given = _kinds(draws.saved()), _kinds(saved)
    if given != own:
        remedy = "Make the buffer with the sampler of the one that was saved."
        raise SchemaError(explain("load_state_dict: draws", f"the state of {sampler}: {own}", given, remedy))
    try:
        draws.resume(saved)
    except ValueError as error:
        remedy = "Pass what state_dict() of a buffer gave."
        raise SchemaError(explain("load_state_dict: draws", f"the state of {sampler}", str(error), remedy)) from error
    check = getattr(draws, "check", None)
    if check is not None:
        check()


def _kinds(saved: Any) -> Any:
    """Names, numbers of axes and dtypes: the lengths are the run's to verify."""
    found = forms(saved)
    return {n: (len(f[0]), f[1]) if type(f) is tuple else f for n, f in found.items()} if type(found) is dict else found
