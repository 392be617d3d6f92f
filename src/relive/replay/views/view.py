"""Views describe a batch by a read plan: single steps, n-step returns, sequences. `BoundView` verifies users' views."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Offsets
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import torch

from relive import lazy
from relive.errors import SchemaError, explain
from relive.replay.read_plan import (
    INDEX,
    WEIGHT,
    LeafSpecs,
    Leaves,
    ReadLayout,
    ReadPlan,
    make_row_plan,
    make_sequence_plan,
)
from relive.rng import Randomness
from relive.schema.assembly import MemoryRange, check_targets, refuse_shared_memory
from relive.schema.checks import check_fraction, check_positive_int
from relive.schema.fields import Path, Schema
from relive.schema.suggestions import suggests_init_keywords

if TYPE_CHECKING:
    from relive.replay.backend import Backend

_MAX_STEPS = 2**30


class View(Protocol):
    """Describes the fields of a batch; a small frozen object.

    A view may also have a method `finish(batch, context)`: its arguments are the leaves that the plan has read, by
    path, and a `ReadContext`; it returns the leaves [B, …] of the final batch.
    """

    def plan(self, schema: Schema, /) -> ReadPlan:
        """Return the plan for a buffer's fields; raises a SchemaError if they do not fit. Called once per buffer."""
        ...


@dataclass(frozen=True)
class ReadContext:
    """The drawn rows, passed to the `finish` of a view."""

    slots: torch.Tensor
    """Flat slots of the drawn rows [B]."""
    random: Randomness
    plan: ReadPlan
    """The plan of the batch."""
    _backend: Backend

    @property
    def schema(self) -> Schema:
        """The fields of the buffer."""
        return self._backend.schema

    def count_preceding(self) -> torch.Tensor:
        """Return the number of transitions of the same episode before each drawn row [B]."""
        return self._backend.count_preceding(self.slots)

    def count_following(self) -> torch.Tensor:
        """Return the number of transitions of the same episode after each drawn row [B]."""
        return self._backend.count_following(self.slots)

    def shift(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the slots of the rows that follow the drawn rows by `steps` [B]."""
        return self._backend.ring.shift(self.slots, steps)

    def column(self, path: Path, slots: torch.Tensor) -> torch.Tensor:
        """Read one leaf at slots [B, …]."""
        return self._backend.read_leaves(slots, (self.schema.paths.index(path),))[0]


@dataclass(frozen=True)
class Transition:
    """Single steps: every field of a row, and `next_obs` before any reset."""

    def plan(self, schema: Schema) -> ReadPlan:
        return make_row_plan(schema)


DEFAULT_VIEW = Transition()


@suggests_init_keywords
@dataclass(frozen=True)
class NStep:
    """reward = Σ_{i<k} γ^i r[t+i], next_obs after k steps, discount = γ^k, where k = min(n, remaining steps).

    The sum stops at the end of the episode or at the newest row; the last n−1 rows of an episode are sampled too.
    `terminated` and `truncated` are the flags of the last summed step. The learner's target is
    reward + discount · (1 − terminated) · Q(next_obs).

    Args:
        n: number of steps to sum, at least 1.
        gamma: discount γ in [0, 1].
    """

    n: int
    gamma: float

    def __post_init__(self) -> None:
        check_positive_int("NStep.n", self.n, math.inf)
        check_fraction("NStep.gamma", self.gamma)

    def plan(self, schema: Schema) -> ReadPlan:
        return make_row_plan(schema, self.n, float(self.gamma))


@suggests_init_keywords
@dataclass(frozen=True)
class Sequence:
    """Sequences of `burn_in + length` steps [B, L, …]; the drawn row is the first step to train on.

    Burn-in steps come before the drawn row; there are fewer if the stored episode starts later. Real steps come first,
    and zero padding at the end: position 0 is always real, and `Carry` fields [B, …] hold its state. "mask" marks real
    steps, "train" real steps without burn-in, "is_first" steps that start an episode. "index" and "weight" belong to
    the drawn row.

    Args:
        length: number of steps to train on, at least 1.
        burn_in: maximum number of steps before them, which warm up the state of a recurrent network.
        cross_episodes: continue into the next episode, whose first step "is_first" marks; otherwise a sequence ends
            with its episode.
        step_index: add "step_index" [B, L]: the "index" of every step, -1 for padding, for `write` and
            `update_priority`.
    """

    length: int
    burn_in: int = 0
    cross_episodes: bool = False
    step_index: bool = False

    def __post_init__(self) -> None:
        # The length has no upper bound here, because `plan` raises a MemoryError for a sequence that is too long.
        check_positive_int("Sequence.length", self.length, math.inf)
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
        return make_sequence_plan(
            schema, self.burn_in, self.length, cross_episodes=bool(self.cross_episodes),
            step_index=bool(self.step_index),
        )  # fmt: skip


class BoundView:
    """A view of one buffer: the plan, a reader of the plan, and the `finish` of the view; None is `Transition()`."""

    def __init__(self, view: Any, backend: Backend, random: Any) -> None:
        chosen_view: Any = DEFAULT_VIEW if view is None else _require_view(view)
        self._backend, self._random = backend, random
        self.plan = _make_plan(chosen_view, backend)
        self.reader = backend.make_reader(self.plan)
        self.finish: Callable[[Leaves, ReadContext], Leaves] | None = getattr(chosen_view, "finish", None)
        is_ours = type(chosen_view).__module__.partition(".")[0] == __name__.partition(".")[0]
        self._users_class = None if self.finish is None or is_ours else type(chosen_view).__name__
        """Class of a user's view whose `finish` computes the batch; None without such a method."""

    def read(self, slots: torch.Tensor, weight: torch.Tensor | None = None) -> Leaves:
        """Read the rows at these slots, apply `finish`, and add weights."""
        leaves = self.reader.read(slots)
        if self.finish is not None:
            leaves = self.finish(leaves, ReadContext(slots, self._random, self.plan, self._backend))
            if self._users_class is not None:
                check_finished_batch(f"{self._users_class}.finish", leaves, slots)
            if INDEX not in leaves:
                leaves[INDEX] = self._backend.ids(slots)
        if weight is not None:
            leaves[WEIGHT] = weight
        return leaves

    def check_out(self, out: lazy.TensorDict, count: int, added: LeafSpecs, memory: Iterable[MemoryRange]) -> Leaves:
        """Return the tensors of `out` by path; raises if a batch of `count` rows does not fit, or overlaps `memory`.

        `added` specifies the leaves of the batch that the view does not read, such as weights. If a user's `finish`
        computes the batch, only `memory` is verified, and no tensors are returned.
        """
        if self._users_class is not None:
            refuse_shared_memory(out, memory)
            return {}
        specs = (self.plan.reduced or self.plan).leaf_specs(self._backend.schema, count) | added
        tensors = check_targets(out, specs, self._backend.device, memory)
        if out.batch_size[:1] != (count,):
            remedy = "Pass an earlier batch as out=."
            raise SchemaError(explain("out", f"a TensorDict of {count} rows", f"batch_size {out.batch_size}", remedy))
        return dict(zip(specs, tensors, strict=True))


def _make_plan(view: Any, backend: Backend) -> ReadPlan:
    """Return the plan of a view for the rows of this backend; raises if the backend cannot read the plan."""
    plan = view.plan(backend.schema)
    if not isinstance(plan, ReadPlan):
        where, remedy = f"{type(view).__name__}.plan", "Return a ReadPlan: see docs/extending.md."
        raise SchemaError(explain(where, "a ReadPlan", type(plan).__name__, remedy))
    if not plan.reads or any(read.leaf not in range(len(backend.schema.fields)) for read in plan.reads):
        where, expected = f"{type(view).__name__}.plan", f"leaves from 0 to {len(backend.schema.fields) - 1}"
        got = [read.leaf for read in plan.reads]
        raise SchemaError(explain(where, expected, got, "Start from the plan of one of relive's views."))
    plan = plan.limit_to_slots(backend.schema, backend.ring.slots)
    _check_offsets(view, plan)
    # A plan with `reduced` belongs to Hindsight, which reads goals from other steps of the episode, so it needs time
    # order.
    if not plan.is_transition or plan.reduced is not None:
        require_time_order(backend, view)
    return plan


def _check_offsets(view: Any, plan: ReadPlan) -> None:
    """Raise if offsets are empty, or if packed sequences have offsets other than one range around 0."""
    windows = [group.offsets for group in plan.groups if group.offsets is not None]
    where, remedy = f"{type(view).__name__}.plan", "Start from the plan of rl.Sequence, or use another layout."
    if not all(map(len, windows)):
        raise SchemaError(explain(where, "at least one offset", "none", "Pass offsets=None to read single items."))
    ends = {(offsets[0], offsets[-1]) for offsets in windows}
    if plan.layout is ReadLayout.PACKED and (len(ends) > 1 or not all(map(_is_range_around_0, windows))):
        got = " and ".join(dict.fromkeys(map(_describe_offsets, windows)))
        expected = "consecutive offsets around 0, the same for all leaves"
        raise SchemaError(explain(where, expected, got, remedy))


def _is_range_around_0(offsets: Offsets[int]) -> bool:
    if not offsets[0] <= 0 <= offsets[-1] or len(offsets) != offsets[-1] - offsets[0] + 1:
        return False
    return isinstance(offsets, range) or all(b - a == 1 for a, b in pairwise(offsets))


def _describe_offsets(offsets: Offsets[int]) -> str:
    return repr(offsets) if isinstance(offsets, range) else repr(tuple(offsets[:8]))


def check_finished_batch(where: str, leaves: Any, slots: torch.Tensor) -> None:
    """Raise unless a user's `finish` returned tensors by path, with one item per row."""
    rows, device = len(slots), slots.device
    remedy = "Return the leaves of the batch by path, each [B, …]."
    if not isinstance(leaves, dict):
        raise SchemaError(explain(where, "a dict of tensors by path", type(leaves).__name__, remedy))
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


def _require_view(view: Any) -> View:
    if isinstance(view, type):
        name = view.__name__
        raise SchemaError(explain("view", f"{name}(…)", f"the class {name}", f"Pass an instance: {name}(…)."))
    if callable(getattr(view, "plan", None)):
        return view
    if hasattr(view, "read"):
        remedy = "Return a ReadPlan from plan(schema), and compute in finish(batch, context): see docs/extending.md."
        raise SchemaError(explain("view", "a view with a method plan", f"{view!r}, which reads by itself", remedy))
    raise SchemaError(explain("view", "a view with a method plan", repr(view), "Pass a view of relive."))


def require_time_order(backend: Backend, reader: object) -> None:
    """Raise if the rows have no time order; `reader` is the view or sampler that reads several steps."""
    if backend.stores_next_obs:
        remedy = 'Use the default next_obs="shared".'
        name = type(reader).__name__
        raise SchemaError(explain(name, "rows in time order", 'a buffer with next_obs="stored"', remedy))
