"""The stored rows of a replay buffer: one tensor per leaf, and the ring with the kind of every slot."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive.checkpoint.snapshot import Rows, State
from relive.errors import SchemaError, explain
from relive.kernels.torch_ops import add_axes
from relive.replay.ring import EMPTY, Ring
from relive.schema.conversion import (
    alias_memory,
    as_indexable,
    convert,
    is_converted,
    make_misaligned_error,
    path_name,
    ranges_overlap,
    refuse_reused_leaves,
)
from relive.schema.fields import Mutable, Path, Schema, Stacked, caller_field
from relive.storage import Allocator
from relive.storage.codec import SnapshotReader


class RowStorage:
    """Tensors `[slots, num_envs, …]` of all leaves; observations are shared with the next row or stored twice.

    Independent of kernels: methods use torch ops, on any device.
    """

    def __init__(
        self, schema: Schema, rows_per_env: int, num_envs: int | None, allocator: Allocator, *, stores_next_obs: bool,
        autoreset: AutoresetMode | None = None, has_stats: bool = False,
    ) -> None:  # fmt: skip
        self.schema = schema
        self.rows_per_env = rows_per_env
        """Maximum number of transitions per environment."""
        self.allocator = allocator
        self.stores_next_obs = stores_next_obs
        """Whether the buffer stores next observations explicitly, so that its rows have no order."""
        self.next_step = autoreset is AutoresetMode.NEXT_STEP
        """Whether the step after the end of an episode only resets its environment (NEXT_STEP)."""
        self.same_step = autoreset is AutoresetMode.SAME_STEP
        """Whether environments reset in the step that ends an episode (SAME_STEP)."""
        self.has_stats = has_stats
        """Whether the buffer has episode statistics, which need `cut()` at every interruption."""
        self.leading_shape = () if num_envs is None else (num_envs,)
        self.obs_leaves = schema.leaf_indices["obs"]
        """Indices of the observation's leaves."""
        self.next_paths = tuple(("next_obs", *schema.paths[i][1:]) for i in self.obs_leaves)
        self.stacked = tuple(i for i, field in enumerate(schema.fields) if isinstance(field, Stacked))
        history = schema.max_stack_frames - 1
        self.ring = Ring.allocate(
            rows_per_env if stores_next_obs else rows_per_env + 1, num_envs or 1, history, allocator
        )
        shape = (self.ring.slots, self.ring.num_envs)
        self.leaves = tuple(
            allocator.allocate(f"column{i}", (*shape, *field.shape), field.dtype)
            for i, field in enumerate(schema.fields)
        )
        self.next_leaves = tuple(
            allocator.allocate(f"next{i}", tuple(self.leaves[i].shape), self.leaves[i].dtype)
            for i in (self.obs_leaves if stores_next_obs else ())
        )
        self.device = self.leaves[0].device
        self.has_values = self.device.type != "meta"
        """Whether the tensors of the rows have values; False on the `meta` device."""
        self.row_checksums = allocator.allocate("seals", (*shape, 2), torch.int64) if allocator.durable else None
        """Two checksums per row: of its observation, and of its other leaves with its number. None without a disk."""
        self.mutable = tuple(i for i, field in enumerate(schema.fields) if isinstance(field, Mutable))
        """Indices of mutable leaves."""
        has_journal = bool(self.mutable) and allocator.persistent
        num_words = 1 + -(-sum(self.leaves[i][0, 0].nbytes for i in self.mutable) // 8)
        self.rewrite_journal = allocator.allocate("ring.rewriting", (num_words,), torch.int64) if has_journal else None
        """The unfinished rewrite of a row, which recovery completes; None if no rewrite can be interrupted."""
        has_checksums = has_journal and allocator.durable
        self.mutable_checksums = allocator.allocate("ring.rewritten", shape, torch.int64) if has_checksums else None
        """Checksum of the mutable leaves of each row [S, N]; None without mutable leaves or without a disk."""
        self.num_invalid_stacks = allocator.allocate("broken", (), torch.int64)
        """Number of frame stacks that cannot be rebuilt, counted on devices where raising would synchronise."""
        self.overflowed = torch.zeros((), dtype=torch.int64, device=self.device)
        """Number of finite values that became infinite in their dtype, counted on devices; not saved."""
        self.unknown_envs = torch.zeros((), dtype=torch.int64, device=self.device)
        """Number of skipped steps with invalid `env_ids` on the device."""
        self._caller_fields = tuple(map(caller_field, schema.fields))
        """Fields of the leaves as callers pass them, with frame stacks."""
        self._caller_shapes = tuple((*self.leading_shape, *field.shape) for field in self._caller_fields)
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        """Addresses of `tensors`, for native kernels."""
        self.memory_ranges = tuple(
            (address, address + x.nbytes) for address, x in zip(self.addresses, self.tensors, strict=True) if address
        )
        """First and end address of each of `tensors`, which `out` of a caller must not overlap."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the rows and of the ring."""
        return *self.leaves, *self.next_leaves, *self.ring.state.values()

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    def end_flags(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the leaves `terminated` and `truncated`."""
        terminated, truncated = (self.leaves[self.schema.leaf_indices[name][0]] for name in ("terminated", "truncated"))
        return terminated, truncated

    def alias_leaves(self) -> dict[Path, torch.Tensor]:
        """Return tensors that share the memory of the leaves, by path, for callers."""
        leaves = dict(zip(self.schema.paths, self.leaves, strict=True))
        if self.stores_next_obs:
            leaves |= dict(zip(self.next_paths, self.next_leaves, strict=True))
        return {path: alias_memory(leaf) for path, leaf in leaves.items()}

    def read_bits(self, leaf: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the values of a leaf at flat slots as ints of the same size; frame stacks are rebuilt."""
        if leaf in self.stacked:
            return as_indexable(self.rebuild_stacks(leaf, slots))
        return as_indexable(self.leaves[leaf].flatten(0, 1))[slots]

    def rebuild_stacks(self, leaf: int, slots: torch.Tensor) -> torch.Tensor:
        """Rebuild the frame stacks of a leaf at flat slots from single frames; zeros where a slot is -1."""
        ring, field = self.ring, self.schema.fields[leaf]
        assert isinstance(field, Stacked)
        column, first = as_indexable(self.leaves[leaf].flatten(0, 1)), ring.first.view(-1)
        frame_slots, is_padding = slots.clamp(min=0), slots < 0
        frames, is_before_start = [column[frame_slots]], torch.zeros_like(is_padding)
        for _ in range(field.k - 1):
            is_before_start = is_before_start | first[frame_slots]
            frame_slots = torch.where(is_before_start, frame_slots, ring.shift(frame_slots, -1))
            frame = column[frame_slots]
            frames.append(frame if field.pad == "repeat" else frame.masked_fill(add_axes(is_before_start, frame), 0))
        stack = torch.stack(frames[::-1], 1 + field.axis)
        return stack.masked_fill(add_axes(is_padding, stack), 0).view(field.dtype)

    def convert_leaf(self, leaf: int, value: Any, leading_shape: tuple[int, ...], prefix: str = "") -> torch.Tensor:
        """Convert a value to a tensor `[*leading_shape, …]` of its leaf's shape and dtype; raises a SchemaError."""
        where, field = prefix + path_name(self.schema.paths[leaf]), self._caller_fields[leaf]
        return convert(where, field, value, leading_shape, self.device, overflowed=self.overflowed)

    def step_shape(self, envs: torch.Tensor | None, steps: int | None = None) -> tuple[int, ...]:
        """Return the leading shape of a step, or of a block of steps, for all environments or for `envs`."""
        leading_shape = self.leading_shape if envs is None else (len(envs),)
        return leading_shape if steps is None else (steps, *leading_shape)

    def can_store_directly(self, leaves: tuple[Any, ...], next_leaves: tuple[Any, ...]) -> bool:
        """Whether a step of all environments can be stored without conversion."""
        fields, shapes, device = self._caller_fields, self._caller_shapes, repeat(self.device)
        if not all(map(is_converted, fields, leaves, shapes, device)):
            return False
        for i, next_leaf in zip(self.obs_leaves, next_leaves, strict=True):
            if not is_converted(fields[i], next_leaf, shapes[i], self.device) or ranges_overlap(leaves[i], next_leaf):
                return False
        return True

    def convert_step(
        self, leaves: tuple[Any, ...], next_leaves: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Convert all leaves of a step or a block, and the leaves of its next observations."""
        leading_shape = self.step_shape(envs, steps)
        obs_and_next = [leaves[i] for i in self.obs_leaves], next_leaves
        if steps is None:
            refuse_reused_leaves(self.schema, *obs_and_next)
        else:
            # In a block cut from one array, `obs` shares memory with the `next_obs` of other steps, so only the first
            # rows are compared.
            refuse_reused_leaves(self.schema, *([_take_first_row(leaf) for leaf in group] for group in obs_and_next))
        converted = tuple(self.convert_leaf(i, value, leading_shape) for i, value in enumerate(leaves))
        converted_next_leaves = tuple(
            self.convert_leaf(i, value, leading_shape, "next_")
            for i, value in zip(self.obs_leaves, next_leaves, strict=True)
        )
        if steps is None:
            # The memory of some objects is known only after their conversion, so it is compared again.
            refuse_reused_leaves(self.schema, [converted[i] for i in self.obs_leaves], converted_next_leaves)
        return converted, converted_next_leaves

    def make_stack_error(self, leaf: int) -> SchemaError:
        """Make the error for a frame stack that cannot be rebuilt.

        `leaf` counts all leaves, and after these the leaves of the next observation.
        """
        is_next = leaf >= len(self.leaves)
        obs_leaf = self.obs_leaves[leaf - len(self.leaves)] if is_next else leaf
        where = ("next_" if is_next else "") + path_name(self.schema.paths[obs_leaf])
        expected = (
            "obs one frame later" if is_next else "the stored frames, or an episode's first frame and its padding"
        )
        remedy = "Check k, axis and pad: only stacks that single frames can rebuild are stored."
        return SchemaError(explain(where, f"a stack of {expected}", "a stack of other frames", remedy))

    def make_misaligned_error(self, leaf: int) -> SchemaError:
        """Make the error for a value at an unaligned address."""
        return make_misaligned_error((*map(path_name, self.schema.paths), *map(path_name, self.next_paths))[leaf])

    def state(self) -> State:
        """Return the state to save: the ring, the pending observations and mutable leaves."""
        pending = self.ring.pending_slots()
        columns = {f"obs{i}": self.leaves[i].flatten(0, 1) for i in self.obs_leaves}
        # An empty slot is saved as zeros: after `clear()` it holds bytes of a deleted row, which a loaded buffer lacks.
        is_empty = self.ring.kind_at(pending) == EMPTY
        pending_bits = {name: as_indexable(column)[pending] for name, column in columns.items()}
        pending_obs = {
            name: bits.masked_fill_(add_axes(is_empty, bits), 0).view(columns[name].dtype)
            for name, bits in pending_bits.items()
        }
        states = {"ring": ({"broken": int(self.num_invalid_stacks)}, self.ring.state), "pending": ({}, pending_obs)}
        if self.mutable:
            states["mutable"] = {}, {f"column{i}": self.leaves[i] for i in self.mutable}
        return State.of_parts(states)

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state."""
        ring = self.ring
        ring.load_state(saved.part("ring"))
        self.num_invalid_stacks.fill_(saved.part("ring").values.entry("broken").integer())
        pending, pending_obs = ring.pending_slots(), saved.part("pending")
        for i in self.obs_leaves:
            leaf = self.leaves[i].flatten(0, 1)
            as_indexable(leaf)[pending] = as_indexable(pending_obs.read_like(f"obs{i}", leaf[: ring.num_envs])).to(
                self.device
            )
        if self.mutable:
            saved.part("mutable").copy_arrays_into({f"column{i}": self.leaves[i] for i in self.mutable})

    def rows_to_save(self) -> Rows:
        """Return the complete rows without their mutable leaves, so that no later write modifies them."""
        tensors = {f"column{i}": leaf for i, leaf in enumerate(self.leaves) if i not in self.mutable}
        tensors |= {f"next{i}": leaf for i, leaf in enumerate(self.next_leaves)}
        ring = self.ring
        if not self.has_values:
            return Rows(tensors, *(torch.zeros(ring.num_envs, dtype=torch.int64, device="cpu") for _ in range(2)))
        oldest = torch.maximum(ring.newest_rows() - ring.slots + 1, ring.floor).clamp(min=0)
        return Rows(tensors, torch.minimum(oldest, ring.head).cpu(), ring.head.cpu().clone())


def _take_first_row(leaf: Any) -> np.ndarray | torch.Tensor | None:
    is_dense = isinstance(leaf, np.ndarray) or (isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)
    return leaf[:1] if is_dense and leaf.ndim else None
