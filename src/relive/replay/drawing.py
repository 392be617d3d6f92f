"""Drawing rows and reading them, so that a batch that cannot be made was not drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from relive import lazy
from relive.errors import NotReadyError, SchemaError, explain
from relive.fields.assembly import assemble, copy_into
from relive.randomness import Randomness
from relive.replay.samplers.protocol import Draws
from relive.replay.store import Leaves, Reading, ReplayStore, durable
from relive.replay.views.protocol import View, check_view
from relive.replay.views.transition import Transition
from relive.storage.allocator import require_memory

_TRANSITION = Transition()
TRANSITION = _TRANSITION.fused
"""What is read where no view is given."""
_MANY = 1 << 20
"""Rows of a batch that are read without a look at the free memory."""


class Drawing:
    """The run of a sampler on a store, with its generator. The caller holds the lock, but for `sample`."""

    def __init__(self, store: ReplayStore, run: Draws, random: Randomness) -> None:
        self._store, self._run, self._random = store, run, random

    def snapshot(self) -> tuple[Any, Any]:
        """What draws change."""
        return self._random.snapshot(), self._run.snapshot()

    def restore(self, before: tuple[Any, Any]) -> None:
        """Go back to a snapshot: the draws since have not happened."""
        self._random.restore(before[0])
        self._run.restore(before[1])

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Take back what is drawn inside, if anything fails."""
        before = self.snapshot()
        try:
            yield
        except BaseException:
            self.restore(before)
            raise

    def sample(
        self, count: int, view: View | None, reading: Reading | None, out: lazy.TensorDict | None,
        lock: AbstractContextManager[Any],
    ) -> lazy.TensorDict:  # fmt: skip
        """A batch, drawn and then read as the view says; one that fails was not drawn. The lock is taken here.

        Where other processes write, the rows of independent draws are copied without the lock, and verified after.
        """
        store, run = self._store, self._run
        steps = 1 if reading is None else max(1, reading.length + reading.burn_in)
        if count * steps > _MANY:
            row = store.memory.nbytes // store.memory.ring.kind.numel()
            require_memory(count * steps * (2 * row + 64), "sample", "Pass a smaller batch_size or shorter sequences.")
        if store.has_neighbours and run.independent_draws and reading == TRANSITION and out is None:
            leaves = durable(store).copy_beside_writers(count, run, lock)
            if leaves is not None:
                return assembled(leaves)
        with lock:
            chosen = self.checked(view)
            if store.maybe_empty:
                raise NotReadyError(explain("sample", "at least 1 stored transition", 0, "Add steps first."))
            with self.undone_on_failure():
                leaves = self.drawn(count, chosen)
                return assembled(leaves) if out is None else copy_into(out, leaves)

    def checked(self, view: View | None) -> View:
        """The view that is meant, if these rows can be read so."""
        chosen: View = _TRANSITION if view is None else instance("view", view, "read")
        check_view(chosen, self._store)
        return chosen

    def drawn(self, count: int, view: View) -> Leaves:
        """The leaves of a batch of `count` rows."""
        drawn = self._run.draw(count)
        # Another object: what the store knows of its own draws may not be so of slots that a sampler has changed.
        slots = drawn.slots if self._run.is_uniform else drawn.slots.contiguous()[:]
        leaves = self._read(slots, view)
        if drawn.weight is not None:
            leaves[("weight",)] = drawn.weight
        return leaves

    def read(self, ids: torch.Tensor, view: View | None) -> lazy.TensorDict:
        """The batch of the rows of these ids, all of which must be stored."""
        chosen, slots = self.checked(view), self._store.locate(ids)
        if len(slots) and int(slots.min()) < 0:  # half the time of (slots < 0).any()
            gone = int(ids[slots < 0][0])
            raise IndexError(explain("index", "stored rows", f"{gone}, which was overwritten", "Sample again."))
        with self.undone_on_failure():
            return assembled(self._read(slots, chosen))

    def _read(self, slots: torch.Tensor, view: View) -> Leaves:
        leaves = view.read(self._store, slots, self._random)
        if ("index",) not in leaves:
            leaves[("index",)] = self._store.ids(slots)
        return leaves


def assembled(leaves: Leaves) -> lazy.TensorDict:
    """The batch of these leaves."""
    return assemble(leaves, leaves[("index",)].shape)


def instance(where: str, thing: Any, method: str) -> Any:
    """What was passed, if it is an object with this method and no class."""
    if isinstance(thing, type):
        name = thing.__name__
        raise SchemaError(explain(where, f"{name}(…)", f"the class {name}", f"Pass an instance: {name}(…)."))
    if not hasattr(thing, method):
        expected = f"a {where} with a method {method}"
        raise SchemaError(explain(where, expected, repr(thing), f"Pass a {where} of relive."))
    return thing
