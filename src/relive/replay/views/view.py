"""Views describe a batch by a read plan: single steps, n-step returns, sequences. `bind_view` verifies users' views."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Offsets
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import torch

from relive.errors import SchemaError, explain
from relive.replay.read_plan import INDEX, Layout, Leaves, ReadPlan, row_plan, sequence_plan
from relive.rng import Randomness
from relive.schema.checks import positive
from relive.schema.checks import share as require_share
from relive.schema.fields import Path, Schema
from relive.schema.suggestions import suggests_init_keywords

if TYPE_CHECKING:
    from relive.replay.backend import Backend

_MAX_STEPS = 2**30


class View(Protocol):
    """The description of a batch: a small frozen object.

    A view may also have a method `finish(batch, context)`, which returns the leaves [B, …] of the batch that a caller
    gets. It is given those of the plan, by path, and a `ReadContext`.
    """

    def plan(self, schema: Schema, /) -> ReadPlan:
        """The plan for these fields, asked once per buffer; a SchemaError says what they do not allow."""
        ...


@dataclass(frozen=True)
class ReadContext:
    """The drawn rows, for a view that finishes a batch."""

    slots: torch.Tensor
    """Flat slots of the drawn rows [B]."""
    random: Randomness
    plan: ReadPlan
    """The plan that the batch was read by."""
    _backend: Backend

    @property
    def schema(self) -> Schema:
        """The fields of the buffer."""
        return self._backend.schema

    def preceding(self) -> torch.Tensor:
        """How many transitions of the same episode precede each drawn row [B]."""
        return self._backend.preceding(self.slots)

    def ahead(self) -> torch.Tensor:
        """How many transitions of the same episode follow each drawn row [B]."""
        return self._backend.ahead(self.slots)

    def later(self, steps: torch.Tensor) -> torch.Tensor:
        """The slots of the rows so many steps after the drawn ones."""
        return self._backend.ring.after(self.slots, steps)

    def column(self, path: Path, slots: torch.Tensor) -> torch.Tensor:
        """One leaf at slots [B, …]."""
        return self._backend.take(slots, (self.schema.paths.index(path),))[0]


@dataclass(frozen=True)
class Transition:
    """Every field of the row and `next_obs`, the state it led to before any reset."""

    def plan(self, schema: Schema) -> ReadPlan:
        return row_plan(schema)


@suggests_init_keywords
@dataclass(frozen=True)
class NStep:
    """reward = Σ_{i<k} γ^i r[t+i], next_obs after k steps, discount = γ^k, where k = min(n, steps that there are).

    A window ends where its episode ends or at the newest row, so that the last n−1 rows of an episode are read too;
    `terminated` and `truncated` are those of its last step. The learner's target is
    reward + discount · (1 − terminated) · Q(next_obs).

    Args:
        n: steps to sum, at least 1.
        gamma: discount γ in [0, 1].
    """

    n: int
    gamma: float

    def __post_init__(self) -> None:
        positive("NStep.n", self.n, math.inf)
        require_share("NStep.gamma", self.gamma)

    def plan(self, schema: Schema) -> ReadPlan:
        return row_plan(schema, self.n, float(self.gamma))


@suggests_init_keywords
@dataclass(frozen=True)
class Sequence:
    """`burn_in + length` steps [B, L, …] around each drawn row, which is the first trained one.

    Burn-in lies before it, as much of its episode as is still stored, so that its length varies by row. Real steps come
    first and padding, which is zero, only at the end: position 0 is always real, and `Carry` fields [B, …] are its
    state. "mask" says which steps are real, "train" which of them are no burn-in, "is_first" which start an episode.
    "index" and "weight" are those of the drawn row.

    Args:
        length: steps to train on, at least 1.
        burn_in: at most so many steps before them, for a recurrent network to find its state.
        cross_episodes: go on into the next episode, where "is_first" says that the state starts anew; otherwise a
            sequence ends with its episode.
        step_index: add "step_index" [B, L], the "index" of every step and -1 where there is none, for `write` and
            `update_priority`.
    """

    length: int
    burn_in: int = 0
    cross_episodes: bool = False
    step_index: bool = False

    def __post_init__(self) -> None:
        positive("Sequence.length", self.length, math.inf)  # `plan` says what no memory holds
        if isinstance(self.burn_in, bool) or not isinstance(self.burn_in, Integral) or self.burn_in < 0:
            raise SchemaError(
                explain("Sequence.burn_in", "a non-negative int", repr(self.burn_in), "Pass an int of at least 0.")
            )

    def plan(self, schema: Schema) -> ReadPlan:
        if self.burn_in + self.length > _MAX_STEPS:
            got = f"{self.burn_in} + {self.length}"
            raise MemoryError(explain("Sequence", f"at most {_MAX_STEPS} steps", got, "Pass a shorter length."))
        if self.step_index and "step_index" in schema.names:
            expected, got = "no field called step_index", "an extra field of this name"
            raise SchemaError(explain("Sequence.step_index", expected, got, "Rename the field."))
        return sequence_plan(schema, self.burn_in, self.length, self.cross_episodes, self.step_index)


Finish = Callable[[Leaves, ReadContext], Leaves]
_TRANSITION = Transition()


def bind_view(view: Any, backend: Backend) -> tuple[ReadPlan, Finish | None]:
    """The plan that a view (None: transitions) has for the rows of a backend, and its `finish`, verified afterwards."""
    chosen: Any = _TRANSITION if view is None else _require_view(view)
    plan = chosen.plan(backend.schema)
    if not isinstance(plan, ReadPlan):
        where, remedy = f"{type(chosen).__name__}.plan", "Return a ReadPlan: see docs/extending.md."
        raise SchemaError(explain(where, "a ReadPlan", type(plan).__name__, remedy))
    if not plan.reads or any(read.leaf not in range(len(backend.schema.fields)) for read in plan.reads):
        where, expected = f"{type(chosen).__name__}.plan", f"leaves from 0 to {len(backend.schema.fields) - 1}"
        got = [read.leaf for read in plan.reads]
        raise SchemaError(explain(where, expected, got, "Start from the plan of one of relive's views."))
    plan = plan.within(backend.ring.slots)
    _check_offsets(chosen, plan)
    if not plan.is_transition or plan.reduced is not None:  # goals come from other steps
        require_order(backend, view)
    finish = getattr(chosen, "finish", None)
    if finish is None or type(chosen).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return plan, finish
    return plan, lambda leaves, context: check_finished(chosen, finish(leaves, context), context)


def _check_offsets(view: Any, plan: ReadPlan) -> None:
    """Raise unless every window has offsets, and those of packed sequences are one range around the drawn row."""
    windows = [group.offsets for group in plan.groups if group.offsets is not None]
    where, remedy = f"{type(view).__name__}.plan", "Start from the plan of rl.Sequence, or use another layout."
    for offsets in windows:
        if not len(offsets):
            raise SchemaError(explain(where, "at least one offset", "none", "Pass offsets=None to read single items."))
        if plan.layout is Layout.PACKED and not _is_range_around_0(offsets):
            raise SchemaError(explain(where, "consecutive offsets around 0", _brief(offsets), remedy))
        if plan.layout is Layout.PACKED and (offsets[0], offsets[-1]) != (windows[0][0], windows[0][-1]):
            got = f"{_brief(windows[0])} and {_brief(offsets)}"
            expected = "consecutive offsets around 0, the same for all leaves"
            raise SchemaError(explain(where, expected, got, remedy))


def _is_range_around_0(offsets: Offsets[int]) -> bool:
    if not offsets[0] <= 0 <= offsets[-1] or len(offsets) != offsets[-1] - offsets[0] + 1:
        return False
    return isinstance(offsets, range) or all(b - a == 1 for a, b in pairwise(offsets))


def _brief(offsets: Offsets[int]) -> str:
    return repr(offsets) if isinstance(offsets, range) else repr(tuple(offsets[:8]))


def plan_of_batch(plan: ReadPlan, finish: Finish | None) -> ReadPlan | None:
    """The plan of the batch that a caller gets; None if a user's `finish`, which `bind_view` wraps, computes it."""
    if finish is None:
        return plan
    return (plan.reduced or plan) if hasattr(finish, "__self__") else None


def check_finished(view: Any, leaves: Any, context: ReadContext) -> Leaves:
    """The leaves that a user's view has returned, if they are tensors by path with an item for each row."""
    where, rows = f"{type(view).__name__}.finish", len(context.slots)
    remedy = "Return the leaves of the batch by path, each [B, …]."
    if not isinstance(leaves, dict):
        raise SchemaError(explain(where, "a dict of tensors by path", type(leaves).__name__, remedy))
    device = context.slots.device
    for path, leaf in leaves.items():
        if not isinstance(path, tuple) or not path or not all(isinstance(name, str) for name in path):
            raise SchemaError(explain(where, "paths that are tuples of names", repr(path), remedy))
        if any(path[:depth] in leaves for depth in range(1, len(path))):
            raise SchemaError(explain(where, "paths that name leaves", f"a leaf inside another at {path}", remedy))
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or len(leaf) != rows or leaf.device != device:
            got = f"{tuple(leaf.shape)} on {leaf.device}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            expected = f"{rows} rows on {device}"
            raise SchemaError(explain(f"{where}: {'.'.join(path)}", expected, got, remedy))
    ids = leaves.get(INDEX)
    if ids is not None and (ids.dtype != torch.int64 or ids.ndim != 1):
        got = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise SchemaError(explain(f"{where}: index", f"int64 of shape ({rows},)", got, "Leave it as it was read."))
    return leaves


def _require_view(view: Any) -> View:
    """The view that was passed; raises if it is none."""
    if isinstance(view, type):
        name = view.__name__
        raise SchemaError(explain("view", f"{name}(…)", f"the class {name}", f"Pass an instance: {name}(…)."))
    if callable(getattr(view, "plan", None)):
        return view
    if hasattr(view, "read"):
        remedy = "Return a ReadPlan from plan(schema), and compute in finish(batch, context): see docs/extending.md."
        raise SchemaError(explain("view", "a view with a method plan", f"{view!r}, which reads by itself", remedy))
    raise SchemaError(explain("view", "a view with a method plan", repr(view), "Pass a view of relive."))


def require_order(backend: Backend, what: object) -> None:
    """Views of more than one step, and samplers of episodes, need rows in time order."""
    if backend.stores_next_obs:
        remedy = 'Use the default next_obs="shared".'
        name = type(what).__name__
        raise SchemaError(explain(name, "rows in time order", 'a buffer with next_obs="stored"', remedy))
