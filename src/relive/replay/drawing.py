"""Drawing rows and reading them, so that a batch that cannot be made was not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from relive import lazy
from relive.errors import NotReadyError, SchemaError, explain
from relive.replay.backend import Backend
from relive.replay.read_plan import INDEX, WEIGHT, Layout, Leaves, PlanReader, ReadPlan
from relive.replay.samplers import Sampler, Uniform
from relive.replay.views.protocol import ReadContext, View, require_order
from relive.replay.views.transition import Transition
from relive.rng import Randomness
from relive.schema.assembly import assemble, copy_into
from relive.storage.allocator import require_memory

Finish = Callable[[Leaves, ReadContext], Leaves]
_TRANSITION = Transition()
_MANY = 1 << 20
"""Rows of a batch that are read without a look at the free memory."""
_MOST_VIEWS = 64
"""Views whose readers are kept."""


class Drawing:
    """A bound sampler and the rows it draws from. The caller holds the lock, but for `sample`."""

    def __init__(self, store: Backend, sampler: Sampler, random: Randomness) -> None:
        self._store, self._sampler, self._random = store, sampler, random
        self._is_uniform = isinstance(sampler, Uniform)
        self._views: dict[View | None, tuple[PlanReader, Finish | None]] = {}

    def snapshot(self) -> tuple[Any, Any]:
        """What draws change."""
        return self._random.snapshot(), self._sampler.snapshot()

    def restore(self, before: tuple[Any, Any]) -> None:
        """Go back to a snapshot: the draws since have not happened."""
        self._random.restore(before[0])
        self._sampler.restore(before[1])

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
        self, count: int, view: View | None, out: lazy.TensorDict | None, lock: AbstractContextManager[Any]
    ) -> lazy.TensorDict:
        """A batch, drawn and then read as the view says; one that fails was not drawn. The lock is taken here.

        Where other processes write, the rows of independent draws are copied without the lock, and verified after.
        """
        reader, finish = self._bound(view)
        if reader.copies_unlocked and finish is None and out is None and self._sampler.independent:
            batch = reader.sample_unlocked(count, self._sampler, lock)
            if batch is not None:
                return batch
        with lock:
            if finish is None:
                batch = reader.sample(count, self._random) if self._is_uniform and out is None else None
                if batch is None and not self._store.maybe_empty:
                    batch = self._sample_reserved(count, reader, out)
                if batch is not None:
                    return batch
            if self._store.maybe_empty:
                raise NotReadyError(explain("sample", "at least 1 stored transition", 0, "Add steps first."))
            self._require_memory(count, reader.plan)
            with self.undone_on_failure():
                leaves = self.drawn(count, view)
                return assembled(leaves) if out is None else copy_into(out, leaves)

    def _sample_reserved(self, count: int, reader: PlanReader, out: lazy.TensorDict | None) -> lazy.TensorDict | None:
        """A batch whose memory is there before its rows are drawn; None where it cannot be reserved."""
        sampler, into_out = self._sampler, out is not None and self._sampler.returns_weights
        if out is not None and not (self._is_uniform or into_out):  # how many rows it chooses is known only afterwards
            return None
        reserved = reader.reserve(count, out, sampler.returns_weights)
        if reserved is None:
            return None
        weight: torch.Tensor | None = None
        if into_out:
            slots = sampler.sample_into(count, reserved[WEIGHT])
        else:
            slots, weight = sampler.choose(count)
        if len(slots) != count:  # the rest of an epoch
            reserved = reader.reserve(len(slots), None, False)
        return reader.fill(reserved, slots, weight, out)

    def _require_memory(self, count: int, plan: ReadPlan) -> None:
        steps = plan.length if plan.layout is Layout.PACKED else 1
        if count * steps > _MANY:
            memory = self._store.rows
            row = memory.nbytes // memory.ring.kind.numel()
            require_memory(count * steps * (2 * row + 64), "sample", "Pass a smaller batch_size or shorter sequences.")

    def drawn(self, count: int, view: View | None) -> Leaves:
        """The leaves of a batch of `count` rows."""
        slots, weight = self._sampler.choose(count)
        # Another object: what the store knows of its own draws may not be so of slots that a sampler has changed.
        leaves = self._read(slots if self._is_uniform else slots.contiguous()[:], view)
        if weight is not None:
            leaves[WEIGHT] = weight
        return leaves

    def read(self, ids: torch.Tensor, view: View | None) -> lazy.TensorDict:
        """The batch of the rows of these ids, all of which must be stored."""
        self._bound(view)
        slots = self._store.locate(ids)
        if len(slots) and int(slots.min()) < 0:  # half the time of (slots < 0).any()
            gone = int(ids[slots < 0][0])
            raise IndexError(explain("index", "stored rows", f"{gone}, which was overwritten", "Sample again."))
        return self.read_slots(slots, view)

    def read_slots(self, slots: torch.Tensor, view: View | None = None) -> lazy.TensorDict:
        """The batch of the rows at these slots."""
        with self.undone_on_failure():
            return assembled(self._read(slots, view))

    def _read(self, slots: torch.Tensor, view: View | None) -> Leaves:
        reader, finish = self._bound(view)
        leaves = reader.read(slots)
        if finish is None:
            return leaves
        leaves = finish(leaves, ReadContext(slots, self._random, reader.plan, self._store))
        if INDEX not in leaves:
            leaves[INDEX] = self._store.ids(slots)
        return leaves

    def _bound(self, view: View | None) -> tuple[PlanReader, Finish | None]:
        """The reader of a view's plan, and what the view does with a batch; made once for equal views."""
        try:
            return self._views[view]
        except KeyError:
            bound = self._views[view] = self._bind(view)
            return bound
        except TypeError:  # it has no hash
            return self._bind(view)

    def _bind(self, view: View | None) -> tuple[PlanReader, Finish | None]:
        chosen: Any = _TRANSITION if view is None else _checked(view)
        plan: ReadPlan = chosen.plan(self._store.schema).within(self._store.ring.slots)
        if not plan.is_transition or plan.reduced is not None:  # goals come from other steps
            require_order(self._store, view)
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        return self._store.reader(plan), getattr(chosen, "finish", None)


def assembled(leaves: Leaves) -> lazy.TensorDict:
    """The batch of these leaves."""
    return assemble(leaves, leaves[("index",)].shape)


def _checked(view: Any) -> View:
    """A view, if it is one."""
    if hasattr(view, "read") and not hasattr(view, "plan"):
        remedy = "Return a ReadPlan from plan(schema), and compute in finish(batch, context): see docs/extending.md."
        raise SchemaError(explain("view", "a view with a method plan", f"{view!r}, which reads by itself", remedy))
    return instance("view", view, "plan")


def instance(where: str, thing: Any, method: str) -> Any:
    """What was passed, if it is an object with this method and no class."""
    if isinstance(thing, type):
        name = thing.__name__
        raise SchemaError(explain(where, f"{name}(…)", f"the class {name}", f"Pass an instance: {name}(…)."))
    if not callable(getattr(thing, method, None)):
        expected = f"a {where} with a method {method}"
        raise SchemaError(explain(where, expected, repr(thing), f"Pass a {where} of relive."))
    return thing
