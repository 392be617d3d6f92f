"""What a sampler is: a description that each buffer starts a run of its own from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch

from relive.randomness import Randomness
from relive.replay.store import ReplayStore


class Drawn(NamedTuple):
    """Rows chosen for a batch."""

    slots: torch.Tensor
    """Flat slots of transitions, int64 [B]."""
    weight: torch.Tensor | None = None
    """Importance weights in (0, 1], float32 [B], where the sampler is not uniform."""


class Draws(Protocol):
    """A sampler at work on one buffer. Only `draw` is needed: what a run leaves out is as it is here.

    A run says what it can do. The defaults are the safe ones: a buffer then draws under its lock, and takes a draw back
    when the batch cannot be made.
    """

    wants_touched: bool = False
    """`written` is to be called: the run keeps numbers of slots."""
    is_uniform: bool = False
    """It draws what `store.draw` draws, and nothing else: the store may draw for it."""
    independent_draws: bool = False
    """Batches have nothing to do with each other: one may be drawn and not used."""
    atomic_draws: bool = False
    """A `draw` that raises has changed nothing."""
    weighs: bool = False
    """Every draw of it has weights, which it writes to a second argument, and as many rows as were asked for."""
    takes_priorities: bool = False
    """It has `update`."""
    takes_ids: bool = False
    """Its `update` is given ids of rows instead of slots, and finds the rows itself."""
    beside_rows: bool = False
    """Its state is in the memory of the buffer, and is found there again with the rows."""
    optional_state: frozenset[str] = frozenset()
    """Names in its state that a saved state may lack: they are then zero."""

    def draw(self, count: int) -> Drawn:
        """Choose `count` rows; the buffer has checked that there are any."""
        ...

    def update(self, slots: torch.Tensor, priority: torch.Tensor) -> Any:
        """Set the priorities of slots; returns how many are -1, rows that are gone."""
        raise TypeError(f"{type(self).__name__}: expected a run that takes priorities.")

    def written(self) -> None:
        """A write has made slots transitions, or has taken transitions away: `store.touched()` says which slots.

        It is called again for the same write when a signal has interrupted it: assign numbers, do not add to them.
        """

    def cleared(self) -> None:
        """The buffer has forgotten every row."""

    def mended(self) -> None:
        """Called when rows changed without `written`: a process died that wrote in the same memory."""

    def snapshot(self) -> Any:
        """What draws change, but for the generator."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot: the draws since have not happened."""

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint needs to go on from here, but for the generator; may share memory."""
        return {}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from what was saved; the rows are there already. A ValueError says what cannot be."""

    def rescale(self, alpha: float, eps: float) -> None:
        """The loaded priorities were those of a `Prioritized` with other exponents; apply the own ones."""

    def faults(self) -> Iterable[str]:
        """What a device has skipped and counted without telling: `check` raises for it, and `save` warns."""
        return ()

    def check(self) -> None:
        """Verify what is kept beside the rows; raises an InvariantError."""


class Sampler(Protocol):
    """The description: a small frozen object that says how rows are chosen."""

    def start(self, store: ReplayStore, random: Randomness, /) -> Draws:
        """A run on this store, with draws of its own."""
        ...


def started(sampler: Sampler, store: ReplayStore, random: Randomness) -> Draws:
    """A run of a sampler; what it leaves out of `Draws` is that class's."""
    run: Any = sampler.start(store, random)
    if not hasattr(run, "takes_priorities"):
        run.takes_priorities = hasattr(run, "update")
    for name in (*_METHODS, *Draws.__annotations__):
        if not hasattr(run, name):
            default = getattr(Draws, name)
            setattr(run, name, MethodType(default, run) if callable(default) else default)
    return run


_METHODS = [name for name, value in vars(Draws).items() if callable(value) and not name.startswith("_")]
