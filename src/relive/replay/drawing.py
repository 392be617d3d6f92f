"""Drawing rows and reading them, so that a batch that cannot be made was not drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from relive.errors import NotReadyError, SchemaError, explain
from relive.randomness import Randomness
from relive.replay.samplers.protocol import Draws
from relive.replay.store import Leaves, ReplayStore
from relive.replay.views.protocol import View, check_view
from relive.replay.views.transition import Transition

_TRANSITION = Transition()


class Drawing:
    """The run of a sampler on a store, with its generator. The caller holds the lock."""

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

    def checked(self, view: View | None) -> View:
        """The view that is meant, if these rows can be read so."""
        chosen: View = _TRANSITION if view is None else instance("view", view, "read")
        check_view(chosen, self._store)
        return chosen

    def require_rows(self) -> None:
        """Raise if there is nothing to draw."""
        if self._store.maybe_empty:
            raise NotReadyError(explain("sample", "at least 1 stored transition", 0, "Add steps first."))

    def drawn(self, count: int, view: View) -> Leaves:
        """The leaves of a batch of `count` rows."""
        drawn = self._run.draw(count)
        leaves = self.read(drawn.slots, view)
        if drawn.weight is not None:
            leaves[("weight",)] = drawn.weight
        return leaves

    def read(self, slots: torch.Tensor, view: View) -> Leaves:
        """The leaves of a batch of the rows at slots."""
        leaves = view.read(self._store, slots, self._random)
        if ("index",) not in leaves:
            leaves[("index",)] = self._store.ids(slots)
        return leaves


def instance(where: str, thing: Any, method: str) -> Any:
    """What was passed, if it is an object with this method and no class."""
    if isinstance(thing, type):
        name = thing.__name__
        raise SchemaError(explain(where, f"{name}(…)", f"the class {name}", f"Pass an instance: {name}(…)."))
    if not hasattr(thing, method):
        expected = f"a {where} with a method {method}"
        raise SchemaError(explain(where, expected, repr(thing), f"Pass a {where} of relive."))
    return thing
