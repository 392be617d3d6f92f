"""Rows by id: resolve "index" [B] and "step_index" [B, L], write to the rows, and sort all rows by time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from relive.errors import SchemaError, explain
from relive.replay.backend import Backend
from relive.schema.conversion import as_numpy_if_cpu, as_tensor, convert, convert_row_ids, path_name
from relive.schema.fields import Schema, mutable_schema

NO_ROW = -1
"""The entry of "step_index" for padding."""


class ResolvedRows(NamedTuple):
    """The slots in which the rows with some ids are stored."""

    slots: torch.Tensor
    """Flat slots [K]; -1 for overwritten rows and for padding."""
    is_padding: torch.Tensor | None = None
    """Mask of padding [K]; None without padding."""

    def without_padding(self, num_skipped: Any) -> Any:
        """Return `num_skipped` minus the number of padding entries; a tensor on devices other than the CPU."""
        return num_skipped if self.is_padding is None else num_skipped - _count(self.is_padding)

    @property
    def stale(self) -> Any:
        """Number of overwritten rows; a tensor on devices other than the CPU."""
        return self.without_padding(_count(self.slots < 0))


def _count(which: torch.Tensor) -> Any:
    total = as_numpy_if_cpu(which).sum()
    return total if isinstance(total, torch.Tensor) else int(total)


def resolve_ids(backend: Backend, flat: torch.Tensor, *, padded: bool) -> ResolvedRows:
    """Resolve ids [K], with `padded` also -1 as padding; raises an IndexError for ids never issued."""
    if not padded:
        return ResolvedRows(backend.locate(flat))
    is_padding = flat == NO_ROW
    if backend.device.type == "cpu":
        slots = torch.full_like(flat, -1)
        slots[~is_padding] = backend.locate(flat[~is_padding])
    else:  # no masked selection: its size would synchronise
        slots = backend.locate(flat).masked_fill(is_padding, -1)
    return ResolvedRows(slots, is_padding)


def flat_ids(index: Any, device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Flatten the ids `index` [B] or [B, L]; returns int64 [K] and their shape."""
    if not isinstance(index, torch.Tensor) or index.ndim != 1:
        index = as_tensor("index", index, device).to(device)
    ids = convert_row_ids(index.reshape(-1) if index.ndim == 2 else index, device)
    return ids, tuple(index.shape)


def convert_rows(backend: Backend, lead: tuple[int, ...], leaves: Mapping[int, Any]) -> dict[int, torch.Tensor]:
    """Convert values of leaves, for ids of the shape `lead`, to tensors [K, …] of the fields' dtypes."""
    values = {}
    for i, value in leaves.items():
        field, where = backend.schema.fields[i], path_name(backend.schema.paths[i])
        tensor = convert(where, field, value, lead, backend.device, unit="rows")
        values[i] = tensor.reshape(math.prod(lead), *field.shape)
    return values


def write_back(
    backend: Backend, flat: torch.Tensor, lead: tuple[int, ...], leaves: Mapping[int, Any], *, padded: bool = False
) -> Any:
    """Overwrite mutable leaves of the rows with ids [K]; returns how many rows were stale and skipped.

    `lead` is the original shape of the ids. -1 is padding if `lead` is (B, L) or `padded` is true.
    """
    values = convert_rows(backend, lead, leaves)
    # Resolved after the conversion, which may run a caller's code that adds rows.
    rows = resolve_ids(backend, flat, padded=padded or len(lead) == 2)
    if len(rows.slots):  # an empty tensor may have arbitrary strides, which the native core rejects
        backend.rewrite(rows.slots, values)
    return rows.stale


def mutable_leaves(schema: Schema, fields: Mapping[str, Any]) -> dict[int, Any]:
    """Flatten fields to leaves by index in the schema; raises if one is not mutable."""
    mutable = mutable_schema(schema)
    names = ", ".join(mutable.names) or "none is declared"
    if not fields:
        remedy = "Pass the new values by name."
        raise SchemaError(explain("write", f"at least one Mutable field ({names})", "no field", remedy))
    leaves: dict[int, Any] = {}
    for name, value in fields.items():
        schema.require(name)
        if name not in mutable.names:
            remedy = "Declare it as rl.Mutable(…), if it is not an observation."
            raise SchemaError(explain(name, f"a Mutable field ({names})", "a field that never changes", remedy))
        paths = (mutable.paths[i] for i in mutable.leaf_indices[name])
        leaves |= dict(zip(map(schema.paths.index, paths), mutable.flatten(name, value), strict=True))
    return leaves


def update_priorities(backend: Backend, sampler: Any, index: Any, priority: torch.Tensor) -> Any:
    """Set the priorities of rows; returns how many rows were stale and skipped."""
    flat, lead = flat_ids(index, backend.device)
    padded = len(lead) == 2
    if sampler.updates_by_id:
        rows = ResolvedRows(flat, flat == NO_ROW if padded else None)
    else:
        rows = resolve_ids(backend, flat, padded=padded)
    if rows.is_padding is None:
        return sampler.update(rows.slots, priority)
    if tuple(priority.shape) != lead:
        remedy = "Pass a priority for each step."
        raise SchemaError(explain("priority", f"shape {lead}", tuple(priority.shape), remedy))
    # A network's output for padding may be NaN.
    return rows.without_padding(sampler.update(rows.slots, priority.reshape(-1).masked_fill(rows.is_padding, 0)))


class SortedRows(NamedTuple):
    """All transitions, sorted by environment and then by time."""

    ids: torch.Tensor
    slots: torch.Tensor
    """Flat slots of the transitions."""
    starts: torch.Tensor
    """Mask of the first stored transition of each episode."""

    def episodes(self) -> list[torch.Tensor]:
        """Split the ids into one tensor per episode."""
        edges = [*self.starts.nonzero().squeeze(1).tolist(), len(self.starts)]
        return [self.ids[start:stop] for start, stop in pairwise(edges)]


def sort_rows(backend: Backend) -> SortedRows:
    """Sort the stored transitions by environment and time."""
    ring, slots = backend.ring, backend.stored()
    ids = backend.ids(slots)
    env, row = ids % ring.num_envs, ids // ring.num_envs
    order = torch.argsort(env * (int(row.max()) + 1 if len(row) else 1) + row)
    ids, slots = ids[order], slots[order]
    follows = (ids[1:] == ids[:-1] + ring.num_envs).nonzero().squeeze(1) + 1
    starts = torch.ones_like(slots, dtype=torch.bool).index_fill(0, follows, False)
    return SortedRows(ids, slots, starts | ring.first.view(-1)[slots])
