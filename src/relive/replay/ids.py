"""Rows by their ids: those that a caller names by "index" [B] or "step_index" [B, L], and all in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from relive.errors import SchemaError, explain
from relive.replay.backend import Backend
from relive.schema.conversion import as_numpy_if_cpu, as_tensor, convert, path_name, row_ids
from relive.schema.fields import Schema, mutable_schema

NO_ROW = -1
"""The entry of "step_index" where a sequence has no step."""


class ResolvedRows(NamedTuple):
    """The slots of named rows."""

    slots: torch.Tensor
    """Flat slots [K]; -1 for rows that are gone, and where no row was named."""
    leading_shape: tuple[int, ...]
    """The shape of what named them: (B,) or (B, L)."""
    is_padding: torch.Tensor | None = None
    """Mask of entries that name no row."""

    def without_padding(self, gone: Any) -> Any:
        """The number of overwritten rows among `gone` slots that are -1; a tensor on other devices."""
        return gone if self.is_padding is None else gone - _count(self.is_padding)

    @property
    def stale(self) -> Any:
        """How many of the named rows were overwritten; a tensor on other devices."""
        return self.without_padding(_count(self.slots < 0))


def _count(which: torch.Tensor) -> Any:
    total = as_numpy_if_cpu(which).sum()
    return total if isinstance(total, torch.Tensor) else int(total)


def resolve_ids(backend: Backend, index: Any) -> ResolvedRows:
    """The rows of ids [B], or of ids [B, L] and -1; an IndexError for ids that were never issued."""
    return _resolve(backend, *flat_ids(index, backend.device))


def _resolve(backend: Backend, flat: torch.Tensor, lead: tuple[int, ...]) -> ResolvedRows:
    return ResolvedRows(backend.locate(flat), lead) if len(lead) == 1 else resolve_padded_ids(backend, flat, lead)


def resolve_padded_ids(backend: Backend, flat: torch.Tensor, lead: tuple[int, ...]) -> ResolvedRows:
    """The rows of a vector of ids and -1, which was of the shape `lead`."""
    is_padding = flat == NO_ROW
    if backend.device.type == "cpu":
        slots = torch.full_like(flat, -1)
        slots[~is_padding] = backend.locate(flat[~is_padding])
    else:  # elsewhere no ids are selected: how many they are would have to be waited for
        slots = backend.locate(flat).masked_fill(is_padding, -1)
    return ResolvedRows(slots, lead, is_padding)


def _unresolved(backend: Backend, index: Any) -> ResolvedRows:
    """The ids themselves in place of slots, for a run that finds the rows while it updates them."""
    flat, lead = flat_ids(index, backend.device)
    return ResolvedRows(flat, lead, flat == NO_ROW if len(lead) == 2 else None)


def flat_ids(index: Any, device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The ids `index` [B] or [B, L] as one vector of int64, and their shape."""
    if not isinstance(index, torch.Tensor) or index.ndim != 1:
        index = as_tensor("index", index, device).to(device)
    ids = row_ids(index.reshape(-1) if index.ndim == 2 else index, device)
    return ids, tuple(index.shape)


def convert_rows(backend: Backend, lead: tuple[int, ...], leaves: Mapping[int, Any]) -> dict[int, torch.Tensor]:
    """Values of leaves for rows that were named by ids of the shape `lead`, as tensors [K, …] that fit."""
    values = {}
    for i, value in leaves.items():
        field, where = backend.schema.fields[i], path_name(backend.schema.paths[i])
        given = convert(where, field, value, lead, backend.device, unit="rows")
        values[i] = given.reshape(math.prod(lead), *field.shape)
    return values


def write_back(
    backend: Backend, flat: torch.Tensor, lead: tuple[int, ...], leaves: Mapping[int, Any], *, padded: bool = False
) -> Any:
    """Write mutable leaves of the rows of ids [K]; returns how many rows were overwritten meanwhile, and skipped.

    `lead` is the shape that the ids had; where it is (B, L), and where they are `padded`, -1 names no row.
    """
    values = convert_rows(backend, lead, leaves)
    # Only now: the conversion of a value may run code that adds rows.
    rows = resolve_padded_ids(backend, flat, lead) if padded else _resolve(backend, flat, lead)
    if len(rows.slots):  # an empty tensor may have arbitrary strides, which the native core rejects
        backend.rewrite(rows.slots, values)
    return rows.stale


def mutable_leaves(schema: Schema, fields: Mapping[str, Any]) -> dict[int, Any]:
    """The given leaves by their place in the schema, all of them mutable."""
    mutable = mutable_schema(schema)
    known = ", ".join(mutable.names) or "none is declared"
    if not fields:
        remedy = "Pass the new values by name."
        raise SchemaError(explain("write", f"at least one Mutable field ({known})", "no field", remedy))
    found: dict[int, Any] = {}
    for name, value in fields.items():
        schema.require(name)
        if name not in mutable.names:
            remedy = "Declare it as rl.Mutable(…), if it is not an observation."
            raise SchemaError(explain(name, f"a Mutable field ({known})", "a field that never changes", remedy))
        paths = (mutable.paths[i] for i in mutable.leaf_indices[name])
        found |= dict(zip(map(schema.paths.index, paths), mutable.flatten(name, value), strict=True))
    return found


def update_priorities(backend: Backend, sampler: Any, index: Any, priority: torch.Tensor) -> Any:
    """Set the priorities of the named rows; returns how many rows were overwritten meanwhile, and skipped."""
    rows = _unresolved(backend, index) if sampler.updates_by_id else resolve_ids(backend, index)
    if rows.is_padding is None:
        return sampler.update(rows.slots, priority)
    if tuple(priority.shape) != rows.leading_shape:
        remedy = "Pass a priority for each step."
        raise SchemaError(explain("priority", f"shape {rows.leading_shape}", tuple(priority.shape), remedy))
    # What a network made of padding may be NaN.
    return rows.without_padding(sampler.update(rows.slots, priority.reshape(-1).masked_fill(rows.is_padding, 0)))


class SortedRows(NamedTuple):
    """All transitions, by environment and then by time."""

    ids: torch.Tensor
    slots: torch.Tensor
    """Their flat slots."""
    starts: torch.Tensor
    """Mask of transitions that start an episode, or what is left of it."""

    def episodes(self) -> list[torch.Tensor]:
        """The ids of each episode."""
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
