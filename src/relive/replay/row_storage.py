"""The stored rows of a replay buffer: a tensor for every leaf, and the ring that says what each slot holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import torch

from relive.checkpoint.snapshot import Rows, SnapshotReader, State
from relive.errors import SchemaError, explain
from relive.kernels.torch_ops import wide
from relive.replay.invariants import check_rows
from relive.replay.ring import Ring, load_ring
from relive.schema.conversion import (
    bits_of,
    convert,
    extents_meet,
    fits,
    misaligned_error,
    path_name,
    refuse_reused_leaves,
    with_own_storage,
)
from relive.schema.fields import Path, Schema, Stacked, caller_field
from relive.schema.mutable import Mutable, is_carried
from relive.storage import Allocator


class RowStorage:
    """Leaves `[slots, num_envs, …]`: observations once, or with a copy of the next ones.

    It knows nothing of kernels: what is here is read and verified with torch ops, on any device.
    """

    def __init__(
        self, schema: Schema, rows_per_env: int, num_envs: int | None, allocator: Allocator, *, keeps_next: bool,
        next_step: bool, same_step: bool, has_stats: bool = False,
    ) -> None:  # fmt: skip
        self.schema = schema
        self.rows_per_env = rows_per_env
        """How many rows of each environment may be drawn, at most."""
        self.allocator = allocator
        self.keeps_next = keeps_next
        """Next observations have tensors of their own: rows are in no order."""
        self.next_step = next_step
        self.same_step = same_step
        """Environments are known to reset in the step that ends an episode."""
        self.has_stats = has_stats
        """Episodes are counted: where one is not continued, a `cut()` is missed."""
        self.lead = () if num_envs is None else (num_envs,)
        self.observed = schema.leaf_indices["obs"]
        """The leaves of the observation."""
        self.next_paths = tuple(("next_obs", *schema.paths[i][1:]) for i in self.observed)
        self.stacked = tuple(i for i, field in enumerate(schema.fields) if isinstance(field, Stacked))
        self.carried = [i for i, field in enumerate(schema.fields) if is_carried(field)]
        """The leaves that a sequence has only at its start."""
        history = schema.deepest_stack - 1
        self.ring = Ring.allocated(rows_per_env if keeps_next else rows_per_env + 1, num_envs or 1, history, allocator)
        shape = (self.ring.slots, self.ring.num_envs)
        self.leaves = tuple(
            allocator.allocate(f"column{i}", (*shape, *field.shape), field.dtype)
            for i, field in enumerate(schema.fields)
        )
        self.next_leaves = tuple(
            allocator.allocate(f"next{i}", tuple(self.leaves[i].shape), self.leaves[i].dtype)
            for i in (self.observed if keeps_next else ())
        )
        self.device = self.leaves[0].device
        self.has_values = self.device.type != "meta"
        """A tensor on `meta` has no values to look at."""
        self.seals = allocator.allocate("seals", (*shape, 2), torch.int64) if allocator.durable else None
        """Checksums of each row's observation and of everything else in it, with its number."""
        self.mutable = tuple(i for i, field in enumerate(schema.fields) if isinstance(field, Mutable))
        """The leaves that may be written again."""
        self.rewriting, self.rewritten = self._write_back_arrays()
        self.broken = allocator.allocate("broken", (), torch.int64)
        """Stacks that cannot be rebuilt, counted where raising would need a host synchronisation."""
        self.overflowed = torch.zeros((), dtype=torch.int64, device=self.device)
        """Finite numbers that became infinite in their field, likewise; not saved."""
        self.unknown_envs = torch.zeros((), dtype=torch.int64, device=self.device)
        """Steps of environments that there are not, counted and skipped where the host does not see `env_ids`."""
        self._given = tuple(map(caller_field, schema.fields))
        """The leaves as callers give them."""
        self._given_shapes = tuple((*self.lead, *field.shape) for field in self._given)
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        """The addresses of `tensors`, for native kernels."""

    def _write_back_arrays(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The journal of a row that is written again, and the checksums [S, N] of what may be written again."""
        allocator, nbytes = self.allocator, sum(self.leaves[i][0, 0].nbytes for i in self.mutable)
        kept = bool(self.mutable) and allocator.persistent
        journal = allocator.allocate("ring.rewriting", (1 + -(-nbytes // 8),), torch.int64) if kept else None
        sealed = kept and allocator.durable
        shape = tuple(self.ring.kind.shape)
        return journal, allocator.allocate("ring.rewritten", shape, torch.int64) if sealed else None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that is kept."""
        return *self.leaves, *self.next_leaves, *self.ring.state.values()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    def flags(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The leaves `terminated` and `truncated`."""
        terminated, truncated = (self.leaves[self.schema.leaf_indices[name][0]] for name in ("terminated", "truncated"))
        return terminated, truncated

    def shared_leaves(self) -> dict[Path, torch.Tensor]:
        """The leaves by their paths, to be handed out."""
        leaves = dict(zip(self.schema.paths, self.leaves, strict=True))
        leaves |= dict(zip(self.next_paths, self.next_leaves, strict=False))  # none where they are shared
        return {path: with_own_storage(leaf) for path, leaf in leaves.items()}

    def bits_at(self, leaf: int, slots: torch.Tensor) -> torch.Tensor:
        """A leaf at flat slots as bits, the stacks of frames rebuilt."""
        if leaf in self.stacked:
            return bits_of(self.rebuild_stacks(leaf, slots))
        return bits_of(self.leaves[leaf].flatten(0, 1))[slots]

    def rebuild_stacks(self, leaf: int, slots: torch.Tensor) -> torch.Tensor:
        """The stacks at flat slots, of a leaf that is kept as single frames; -1 gives zeros."""
        ring, field = self.ring, self.schema.fields[leaf]
        assert isinstance(field, Stacked)
        frames, first = bits_of(self.leaves[leaf].flatten(0, 1)), ring.first.view(-1)
        at, missing = slots.clamp(min=0), slots < 0
        found, started = [frames[at]], torch.zeros_like(missing)
        for _ in range(field.k - 1):
            started = started | first[at]
            at = torch.where(started, at, ring.before(at))
            frame = frames[at]
            found.append(frame if field.pad == "repeat" else frame.masked_fill(wide(started, frame), 0))
        stack = torch.stack(found[::-1], 1 + field.axis)
        return stack.masked_fill(wide(missing, stack), 0).view(field.dtype)

    # Values of a step, as callers pass them

    def conform(self, leaf: int, value: Any, lead: tuple[int, ...], prefix: str = "") -> torch.Tensor:
        """A value as a tensor `[*lead, …]` that fits its leaf exactly, or a SchemaError."""
        where = prefix + path_name(self.schema.paths[leaf])
        return convert(where, self._given[leaf], value, lead, self.device, overflowed=self.overflowed)

    def lead_of(self, envs: torch.Tensor | None, steps: int | None = None) -> tuple[int, ...]:
        """The first axes of what is given for a step, or for a block of steps, of all environments or of `envs`."""
        lead = self.lead if envs is None else (len(envs),)
        return lead if steps is None else (steps, *lead)

    def fits(self, leaves: tuple[Any, ...], nexts: tuple[Any, ...]) -> bool:
        """Whether a step of all environments can be stored without conversion."""
        fields, shapes, device = self._given, self._given_shapes, repeat(self.device)
        if not all(map(fits, fields, leaves, shapes, device)):
            return False
        for i, following in zip(self.observed, nexts, strict=True):
            if not fits(fields[i], following, shapes[i], self.device) or extents_meet(leaves[i], following):
                return False
        return True

    def conformed(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """All leaves of a step or a block as tensors that fit, and those of its next observations."""
        lead = self.lead_of(envs, steps)
        observed = [leaves[i] for i in self.observed], nexts
        if steps is None:
            refuse_reused_leaves(self.schema, *observed)
        else:  # of a block that is cut out of one array, the observations of one step are the next ones of another
            refuse_reused_leaves(self.schema, *([_first_row(leaf) for leaf in group] for group in observed))
        fitted = tuple(self.conform(i, value, lead) for i, value in enumerate(leaves))
        fitted_nexts = tuple(
            self.conform(i, value, lead, "next_") for i, value in zip(self.observed, nexts, strict=True)
        )
        if steps is None:  # again: other objects than arrays and tensors are seen through only now
            refuse_reused_leaves(self.schema, [fitted[i] for i in self.observed], fitted_nexts)
        return fitted, fitted_nexts

    def unstackable(self, leaf: int) -> SchemaError:
        """The error for a stack (of a leaf, or after all leaves of a next observation) that cannot be rebuilt."""
        count = len(self.leaves)
        is_next = leaf >= count
        at = self.observed[leaf - count] if is_next else leaf
        where = ("next_" if is_next else "") + path_name(self.schema.paths[at])
        expected = (
            "obs one frame later" if is_next else "the stored frames, or an episode's first frame and its padding"
        )
        remedy = "Check k, axis and pad: only stacks that single frames can rebuild are stored."
        return SchemaError(explain(where, f"a stack of {expected}", "a stack of other frames", remedy))

    def misplaced(self, leaf: int) -> SchemaError:
        """The error for a value that fits its leaf and cannot be read all the same."""
        return misaligned_error((*map(path_name, self.schema.paths), *map(path_name, self.next_paths))[leaf])

    # Saving

    def state(self) -> State:
        """The ring, the newest observations, which wait in rows that are not complete, and all that may change."""
        pending = self.ring.pending()
        columns = {f"obs{i}": self.leaves[i].flatten(0, 1) for i in self.observed}
        waiting = {name: bits_of(column)[pending].view(column.dtype) for name, column in columns.items()}
        parts = {"ring": ({"broken": int(self.broken)}, self.ring.state), "pending": ({}, waiting)}
        if self.mutable:  # without them, checkpoints are as they were before there were any
            parts["mutable"] = {}, {f"column{i}": self.leaves[i] for i in self.mutable}
        return State.of_parts(parts)

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore what `state` gave."""
        ring = self.ring
        load_ring(ring, saved.part("ring"))
        self.broken.fill_(saved.part("ring").values.entry("broken").integer())
        pending, waiting = ring.pending(), saved.part("pending")
        for i in self.observed:
            leaf = self.leaves[i].flatten(0, 1)
            bits_of(leaf)[pending] = bits_of(waiting.array(f"obs{i}", leaf[: ring.num_envs])).to(self.device)
        if self.mutable:
            saved.part("mutable").copy_into({f"column{i}": self.leaves[i] for i in self.mutable})

    def complete_rows(self) -> Rows:
        """The rows that are complete, without what may be written again: they will never change."""
        tensors = {f"column{i}": leaf for i, leaf in enumerate(self.leaves) if i not in self.mutable}
        tensors |= {f"next{i}": leaf for i, leaf in enumerate(self.next_leaves)}
        ring = self.ring
        if not self.has_values:
            return Rows(tensors, *(torch.zeros(ring.num_envs, dtype=torch.int64, device="cpu") for _ in range(2)))
        oldest = torch.maximum(ring.newest() - ring.slots + 1, ring.floor).clamp(min=0)
        return Rows(tensors, torch.minimum(oldest, ring.head).cpu(), ring.head.cpu().clone())

    def check(self, is_valid: Callable[[], bool] | None = None) -> None:
        """Verify that the leaves are as declared, and that the ring holds whole transitions of whole episodes."""
        check_rows(self, is_valid)


def _first_row(leaf: Any) -> Any:
    dense = isinstance(leaf, np.ndarray) or (isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)
    return leaf[:1] if dense and leaf.ndim else None
