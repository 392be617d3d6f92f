"""Read plans: the leaves, offsets and sums that a view reads around each drawn row; a backend's reader executes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from relive import lazy
from relive.errors import SchemaError, explain
from relive.schema.assembly import MemoryRange, assemble, checked_targets, copy_leaves
from relive.schema.fields import Path, Schema, caller_shape, is_carried

if TYPE_CHECKING:
    from relive.replay.backend import Backend
    from relive.replay.samplers import Sampler

Leaves = dict[Path, torch.Tensor]
"""The leaves of a batch by path, in its order."""
Forms = dict[Path, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of every leaf of a batch, in its order."""

INDEX: Path = ("index",)
WEIGHT: Path = ("weight",)
DISCOUNT: Path = ("discount",)
MASK: Path = ("mask",)
TRAIN: Path = ("train",)
IS_FIRST: Path = ("is_first",)
STEP_INDEX: Path = ("step_index",)


class Anchor(IntEnum):
    """The row that offsets count from; the native core has the same numbers."""

    ROW = 0
    """The drawn row."""
    LAST = 1
    """The last of up to n steps from the drawn row on: the end of its episode or the newest row may come first."""
    NEXT = 2
    """The observation that the last step led to."""
    FIRST = 3
    """The first step of a packed sequence."""
    SUM = 4
    """All steps from the drawn row to the last one, as their discounted sum."""


class Layout(IntEnum):
    """The treatment of offsets outside the episode, or not stored; the native core has the same numbers."""

    NEAREST = 0
    """In their places: the nearest step is repeated."""
    ZEROS = 1
    """In their places: zeros."""
    PACKED = 2
    """After all real steps, as zeros."""


class Group(NamedTuple):
    """A place that leaves are read at: an anchor, and offsets from it on."""

    anchor: Anchor
    offsets: Sequence[int] | None = None
    """None: one item per row [B, …]. Otherwise [B, len(offsets), …]; a range if the layout is packed."""
    mask: Path | None = None
    """The path in the batch of which offsets are real [B, len(offsets)]."""
    of_observations: bool = False
    """Offsets count observations, of which an episode has one more than steps."""


class LeafRead(NamedTuple):
    """One leaf of a batch."""

    path: Path
    leaf: int
    """The leaf of the schema; of a next observation, that of the observation."""
    group: Group


ROW, LAST, NEXT, FIRST, SUM = map(Group, Anchor)


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """The leaves of a batch, each at the places of its group.

    A batch also has "index" [B], the ids of the drawn rows, the masks of its groups, and "discount" if n > 0. Packed
    sequences have "train", the steps from the drawn row on, and "is_first", the steps that start an episode.
    """

    reads: tuple[LeafRead, ...]
    n: int = 0
    """Number of steps that are summed; 0 reads single steps."""
    gamma: float = 0.0
    layout: Layout = Layout.NEAREST
    cross_episodes: bool = False
    """Packed sequences go on into the next episode."""
    step_index: bool = False
    """Packed sequences have "step_index" [B, L], the ids of their steps, and -1 where there is none."""
    reduced: ReadPlan | None = None
    """The plan that these are the unreduced steps of."""
    max_steps: int = 2**63
    """No offset that is read in its place needs more steps before or after a row."""

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all leaves, in the order of their first one."""
        return tuple(dict.fromkeys(read.group for read in self.reads))

    @cached_property
    def masked(self) -> tuple[Group, ...]:
        """The groups whose masks are in the batch."""
        return tuple(group for group in self.groups if group.mask is not None)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The paths of a batch in the order that every backend gives them."""
        discount = (DISCOUNT,) if self.n else ()
        masks = tuple(group.mask for group in self.masked if group.mask is not None)
        marks = (TRAIN, IS_FIRST) if self.layout is Layout.PACKED else ()
        steps = (STEP_INDEX,) if self.step_index else ()
        return *(read.path for read in self.reads), INDEX, *discount, *masks, *marks, *steps

    @cached_property
    def is_transition(self) -> bool:
        """Whether single steps are read and nothing around them."""
        return not self.n and not any(group.offsets is not None for group in self.groups)

    @cached_property
    def reach(self) -> tuple[int, int]:
        """How many steps before and after a row any offset may need."""
        last = max(self.n, 1) - 1
        before, after = 0, last
        for group in self.groups:
            if group.offsets is not None and self.layout is Layout.PACKED:
                before, after = -group.offsets[0], group.offsets[-1]  # a range, which may be long
            elif group.offsets is not None:
                is_next = group.anchor is Anchor.NEXT
                before = max(before, -min(group.offsets) - is_next)
                after = max(after, max(group.offsets) + (last if is_next else -group.of_observations))
        if self.layout is Layout.PACKED:
            return before, after
        return min(before, self.max_steps), min(after, self.max_steps)

    @property
    def length(self) -> int:
        """The number of steps that any offset may need."""
        return sum(self.reach) + 1

    @cached_property
    def max_items(self) -> int:
        """The largest number of steps that a leaf of one row is read at."""
        return max(self.n, 1, *(len(group.offsets or ()) for group in self.groups))

    def forms(self, schema: Schema, count: int) -> Forms:
        """The shape and dtype of every leaf of a batch of `count` rows, in the order of `paths`."""
        steps = (count, self.length)
        found: Forms = {INDEX: ((count,), torch.int64), DISCOUNT: ((count,), torch.float32)}
        found |= {STEP_INDEX: (steps, torch.int64), TRAIN: (steps, torch.bool), IS_FIRST: (steps, torch.bool)}
        for path, leaf, group in self.reads:
            lead = (count,) if group.offsets is None else (count, len(group.offsets))
            found[path] = (*lead, *caller_shape(schema.fields[leaf])), schema.fields[leaf].dtype
            if group.mask is not None:
                found[group.mask] = lead, torch.bool
        return {path: found[path] for path in self.paths}

    def unreduced(self, schema: Schema) -> ReadPlan:
        """Every field of all steps that this plan needs, for a view that changes them and calls `reduce`.

        Packed, without those of single steps, which have no axis of steps.
        """
        if self.is_transition:
            return replace(row_plan(schema), reduced=self)
        before, after = self.reach
        steps, nexts = _sequence(before, after + 1)
        reads = [LeafRead(path, i, steps) for i, path in enumerate(schema.paths)]
        reads += [LeafRead(next_path(schema.paths[i]), i, nexts) for i in schema.leaf_indices["obs"]]
        return ReadPlan(tuple(reads), layout=Layout.PACKED, step_index=self.step_index, reduced=self)

    def within(self, slots: int) -> ReadPlan:
        """A plan that reads no further than a ring of so many slots can hold."""
        if self.reduced is None:
            return replace(self, n=min(self.n, slots), max_steps=slots - 1)
        reduced = self.reduced.within(slots)
        if self.is_transition:
            return replace(self, reduced=reduced)
        before, after = reduced.reach
        steps, nexts = _sequence(before, after + 1)
        reads = (read._replace(group=nexts if read.group.anchor is Anchor.NEXT else steps) for read in self.reads)
        return replace(self, reads=tuple(reads), reduced=reduced)


class PlanReader:
    """Reads batches of one plan from the rows of a backend; only `read` is needed."""

    copies_unlocked = False
    """It has `sample_unlocked`: other processes write here, and would wait while rows are copied."""

    def __init__(self, backend: Backend, plan: ReadPlan) -> None:
        self.plan, self._backend = plan, backend

    def read(self, slots: torch.Tensor) -> Leaves:
        """The batch of the rows at these slots, in fresh tensors."""
        raise NotImplementedError

    def sample(self, count: int, random: Any) -> lazy.TensorDict | None:
        """A batch of rows that are drawn uniformly, in one call; None where there is no such call."""

    def reserve(self, count: int, out: lazy.TensorDict | None, weighs: bool, own: Iterable[MemoryRange] = ()) -> Any:
        """Reserve memory for a batch before its rows are drawn, for `fill`; that of `out`, verified, if it is given."""
        if out is None:
            return None
        return self.targets(self.plan, count, out, weighs, own)

    def targets(
        self, plan: ReadPlan, count: int, out: lazy.TensorDict, weighs: bool, own: Iterable[MemoryRange] = ()
    ) -> Leaves:
        """The tensors of `out` by path; raises if a batch of a plan does not fit them, or if they overlap `own`."""
        forms = plan.forms(self._backend.schema, count)
        if weighs:
            forms[WEIGHT] = (count,), torch.float32
        found = checked_targets(out, forms, self._backend.device, own)
        if out.batch_size[:1] != (count,):
            remedy = "Pass an earlier batch as out=."
            raise SchemaError(explain("out", f"a TensorDict of {count} rows", f"batch_size {out.batch_size}", remedy))
        return dict(zip(forms, found, strict=True))

    def fill(
        self, reserved: Any, slots: torch.Tensor, weight: torch.Tensor | None, out: lazy.TensorDict | None
    ) -> lazy.TensorDict:
        """The batch of the rows at these slots in reserved memory; weights are in `out` already."""
        leaves = self.read(slots)
        if out is not None:
            copy_leaves((reserved[path], leaf) for path, leaf in leaves.items())
            return out
        if weight is not None:
            leaves[WEIGHT] = weight
        return assemble(leaves, slots.shape)

    def sample_unlocked(
        self, count: int, sampler: Sampler, lock: AbstractContextManager[Any]
    ) -> lazy.TensorDict | None:
        """A batch that `sampler` draws under the lock, copied without it; None if a row was overwritten meanwhile."""


def row_plan(
    schema: Schema, n: int = 0, gamma: float = 0.0, windows: Mapping[Path, Group] | None = None,
    layout: Layout = Layout.NEAREST,
) -> ReadPlan:  # fmt: skip
    """Every field of each row and the next observation, of one step or of n steps as one; `windows` replace places."""
    places = {"reward": SUM, "terminated": LAST, "truncated": LAST} if n else {}
    found = {path: (i, places.get(path[0], ROW)) for i, path in enumerate(schema.paths)}
    found |= {next_path(schema.paths[i]): (i, NEXT) for i in schema.leaf_indices["obs"]}
    named = windows or {}
    return ReadPlan(
        tuple(LeafRead(path, leaf, named.get(path, group)) for path, (leaf, group) in found.items()), n, gamma, layout
    )


def sequence_plan(
    schema: Schema, burn_in: int, length: int, cross_episodes: bool = False, step_index: bool = False
) -> ReadPlan:
    """Packed sequences of up to `burn_in` steps before each row, and `length` steps from it on."""
    steps, nexts = _sequence(burn_in, length)
    carried = [i for i, field in enumerate(schema.fields) if is_carried(field)]
    reads = [LeafRead(path, i, steps) for i, path in enumerate(schema.paths) if i not in carried]
    reads += [LeafRead(next_path(schema.paths[i]), i, nexts) for i in schema.leaf_indices["obs"]]
    reads += [LeafRead(schema.paths[i], i, FIRST) for i in carried]
    return ReadPlan(
        tuple(reads), layout=Layout.PACKED, cross_episodes=bool(cross_episodes), step_index=bool(step_index)
    )


def _sequence(burn_in: int, length: int) -> tuple[Group, Group]:
    """The steps of a sequence, and the observations that they led to."""
    offsets = range(-burn_in, length)
    return Group(Anchor.ROW, offsets, MASK), Group(Anchor.NEXT, offsets)


def next_path(path: Path) -> Path:
    """The path of an observation's leaf in the next observation."""
    return ("next_obs", *path[1:])
