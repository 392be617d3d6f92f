"""Read plans: the leaves, offsets and sums that a view reads around each drawn row. Readers execute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from relive import lazy
from relive.schema.assembly import assemble_batch, copy_tensor_pairs
from relive.schema.fields import Path, Schema, caller_shape, is_initial_state

if TYPE_CHECKING:
    from relive.replay.backend import Backend
    from relive.replay.samplers import Sampler

Leaves = dict[Path, torch.Tensor]
"""The leaves of a batch by path, in its order."""
LeafSpecs = dict[Path, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of every leaf of a batch, in its order."""

INDEX: Path = ("index",)
WEIGHT: Path = ("weight",)
DISCOUNT: Path = ("discount",)
MASK: Path = ("mask",)
TRAIN: Path = ("train",)
IS_FIRST: Path = ("is_first",)
STEP_INDEX: Path = ("step_index",)


class ReadAnchor(IntEnum):
    """The row at which a leaf is read, or from which its offsets count. The native core uses the same numbers."""

    ROW = 0
    """The drawn row."""
    LAST = 1
    """The last summed step: n - 1 rows after the drawn row, or fewer where the episode or the stored rows end.

    Without a sum, the drawn row.
    """
    NEXT = 2
    """The observation after the last summed step."""
    FIRST = 3
    """The first step of a packed sequence."""
    SUM = 4
    """No single row: the discounted sum over the rows from the drawn row to the last summed step."""


class ReadLayout(IntEnum):
    """The treatment of offsets outside the stored episode. The native core uses the same numbers."""

    NEAREST = 0
    """Each offset outside the episode repeats the nearest step."""
    ZEROS = 1
    """Each offset outside the episode gives zeros."""
    PACKED = 2
    """All stored steps come first, followed by zeros."""


class ReadGroup(NamedTuple):
    """The positions at which leaves are read, as offsets from an anchor."""

    anchor: ReadAnchor
    offsets: Sequence[int] | None = None
    """Offsets to read [B, len(offsets), …], a range if the layout is packed; None reads one item per row [B, …]."""
    mask: Path | None = None
    """Path of the batch's mask of offsets that hold real steps [B, len(offsets)]; None without a mask."""
    counts_observations: bool = False
    """Whether offsets count observations, of which an episode has one more than steps."""


class LeafRead(NamedTuple):
    """One leaf of a batch, and the positions at which the reader reads it."""

    path: Path
    leaf: int
    """Index of the leaf in the schema; for a next observation, the leaf of the observation."""
    group: ReadGroup


ROW, LAST, NEXT, FIRST, SUM = map(ReadGroup, ReadAnchor)


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """The leaves of a batch. Each leaf belongs to a `ReadGroup`: the positions around the drawn row to read.

    A batch also has "index" [B] (the ids of the drawn rows), the masks of the groups, and "discount" if rewards are
    summed over `n` steps. Packed sequences have "train", the steps from the drawn row on, and "is_first", the steps
    that start an episode.
    """

    reads: tuple[LeafRead, ...]
    n: int = 0
    """Number of steps to sum; 0 reads single steps."""
    gamma: float = 0.0
    layout: ReadLayout = ReadLayout.NEAREST
    cross_episodes: bool = False
    """Whether packed sequences continue into the next episode."""
    step_index: bool = False
    """Whether packed sequences have "step_index" [B, L]: the ids of their steps, -1 for padding."""
    reduced: ReadPlan | None = None
    """The plan of the final batch, for which `reduce_steps` needs these steps; None without a reduction."""
    max_steps: int = 2**63
    """Upper bound of `num_steps_around`; packed plans ignore it."""

    @cached_property
    def groups(self) -> tuple[ReadGroup, ...]:
        """The distinct groups, in the order of their first leaf."""
        return tuple(dict.fromkeys(read.group for read in self.reads))

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the fields of a batch, in the order in which every backend returns them."""
        discount = (DISCOUNT,) if self.n else ()
        masks = tuple(group.mask for group in self.groups if group.mask is not None)
        step_masks = (TRAIN, IS_FIRST) if self.layout is ReadLayout.PACKED else ()
        steps = (STEP_INDEX,) if self.step_index else ()
        return *(read.path for read in self.reads), INDEX, *discount, *masks, *step_masks, *steps

    @cached_property
    def is_transition(self) -> bool:
        """Whether this plan reads only single steps."""
        return not self.n and not any(group.offsets is not None for group in self.groups)

    @cached_property
    def num_steps_around(self) -> tuple[int, int]:
        """Numbers of steps before and after a row that the plan reads."""
        last = max(self.n, 1) - 1
        before, after = 0, last
        for group in self.groups:
            if group.offsets is not None and self.layout is ReadLayout.PACKED:
                # A range of offsets may be too long to iterate over, so only its ends are read.
                before, after = -group.offsets[0], group.offsets[-1]
            elif group.offsets is not None:
                is_next = group.anchor is ReadAnchor.NEXT
                before = max(before, -min(group.offsets) - is_next)
                after = max(after, max(group.offsets) + (last if is_next else -group.counts_observations))
        if self.layout is ReadLayout.PACKED:
            return before, after
        return min(before, self.max_steps), min(after, self.max_steps)

    @property
    def num_steps(self) -> int:
        """Number of steps from the first to the last one that the plan reads."""
        return sum(self.num_steps_around) + 1

    @cached_property
    def max_steps_per_row(self) -> int:
        """Maximum number of steps that one leaf reads per row."""
        return max(self.n, 1, *(len(group.offsets or ()) for group in self.groups))

    def leaf_specs(self, schema: Schema, count: int) -> LeafSpecs:
        """Return the shape and dtype of every leaf of a batch of `count` rows, in the order of `paths`."""
        steps = (count, self.num_steps)
        forms: LeafSpecs = {INDEX: ((count,), torch.int64), DISCOUNT: ((count,), torch.float32)}
        forms |= {STEP_INDEX: (steps, torch.int64), TRAIN: (steps, torch.bool), IS_FIRST: (steps, torch.bool)}
        for path, leaf, group in self.reads:
            leading = (count,) if group.offsets is None else (count, len(group.offsets))
            forms[path] = (*leading, *caller_shape(schema.fields[leaf])), schema.fields[leaf].dtype
            if group.mask is not None:
                forms[group.mask] = leading, torch.bool
        return {path: forms[path] for path in self.paths}

    def with_all_steps(self, schema: Schema) -> ReadPlan:
        """Return the plan of every field of all needed steps, for a view that changes steps and calls `reduce_steps`.

        The steps are packed sequences; for a plan of single steps they have no axis of steps.
        """
        if self.is_transition:
            return replace(make_row_plan(schema), reduced=self)
        before, after = self.num_steps_around
        plan = make_sequence_plan(schema, before, after + 1, step_index=self.step_index, all_states=True)
        return replace(plan, reduced=self)

    def limit_to_slots(self, schema: Schema, num_slots: int) -> ReadPlan:
        """Return the plan without steps beyond those that a ring of `num_slots` slots can hold."""
        if self.reduced is None:
            return replace(self, n=min(self.n, num_slots), max_steps=num_slots - 1)
        return self.reduced.limit_to_slots(schema, num_slots).with_all_steps(schema)


class PlanReader:
    """Reads batches of one plan. Subclasses need only `read`."""

    copies_unlocked = False
    """Whether `sample_unlocked` is implemented: it copies rows without the lock that other processes need."""

    def __init__(self, backend: Backend, plan: ReadPlan) -> None:
        self.plan, self._backend = plan, backend

    def read(self, slots: torch.Tensor) -> Leaves:
        """Read the rows at these slots into new tensors."""
        raise NotImplementedError

    def sample(self, count: int, random: Any) -> lazy.TensorDict | None:
        """Draw rows uniformly and read them in one call; None if this reader has no such call."""

    def reserve_batch(self, count: int) -> Any:
        """Return memory for a batch, reserved before its rows are drawn; None if `fill_batch` allocates it."""

    def fill_batch(self, reserved_batch: Any, slots: torch.Tensor, weight: torch.Tensor | None) -> lazy.TensorDict:
        """Read the rows at these slots into memory from `reserve_batch`, and add their weights."""
        leaves = self.read(slots)
        if weight is not None:
            leaves[WEIGHT] = weight
        return assemble_batch(leaves, slots.shape)

    def read_into(self, targets: Leaves, slots: torch.Tensor) -> None:
        """Read the rows at these slots into a caller's tensors, except for weights, which the sampler has written."""
        copy_tensor_pairs((targets[path], leaf) for path, leaf in self.read(slots).items())

    def sample_unlocked(
        self, count: int, sampler: Sampler, lock: AbstractContextManager[Any]
    ) -> lazy.TensorDict | None:
        """Draw rows under the lock and copy them without it; returns None if a row was overwritten meanwhile."""


def make_row_plan(
    schema: Schema, n: int = 0, gamma: float = 0.0, windows: Mapping[Path, ReadGroup] | None = None,
    layout: ReadLayout = ReadLayout.NEAREST,
) -> ReadPlan:  # fmt: skip
    """Return the plan of every field and next observation of one step, or of `n` summed steps.

    `windows` replaces the groups of some leaves, by their paths in the batch.
    """
    groups = {"reward": SUM, "terminated": LAST, "truncated": LAST} if n else {}
    leaves = {path: (i, groups.get(path[0], ROW)) for i, path in enumerate(schema.paths)}
    leaves |= {make_next_obs_path(schema.paths[i]): (i, NEXT) for i in schema.leaf_indices["obs"]}
    windows = windows or {}
    return ReadPlan(
        tuple(LeafRead(path, leaf, windows.get(path, group)) for path, (leaf, group) in leaves.items()),
        n,
        gamma,
        layout,
    )


def make_sequence_plan(
    schema: Schema, burn_in: int, length: int, *, cross_episodes: bool = False, step_index: bool = False,
    all_states: bool = False,
) -> ReadPlan:  # fmt: skip
    """Return the plan of packed sequences: up to `burn_in` steps before each row, and `length` steps from there on.

    `Carry` fields are read at the first step of a sequence; with `all_states`, at every step.
    """
    offsets = range(-burn_in, length)
    steps, next_group = ReadGroup(ReadAnchor.ROW, offsets, MASK), ReadGroup(ReadAnchor.NEXT, offsets)
    initial_states = [i for i, field in enumerate(schema.fields) if is_initial_state(field) and not all_states]
    reads = [LeafRead(path, i, steps) for i, path in enumerate(schema.paths) if i not in initial_states]
    reads += [LeafRead(make_next_obs_path(schema.paths[i]), i, next_group) for i in schema.leaf_indices["obs"]]
    reads += [LeafRead(schema.paths[i], i, FIRST) for i in initial_states]
    return ReadPlan(tuple(reads), layout=ReadLayout.PACKED, cross_episodes=cross_episodes, step_index=step_index)


def make_next_obs_path(path: Path) -> Path:
    """Return the path of the next observation that corresponds to the path of an observation's leaf."""
    return ("next_obs", *path[1:])
