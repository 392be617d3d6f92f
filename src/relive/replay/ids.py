"""Rows by id: finding and rewriting the rows of "index" [B] or "step_index" [B, L], and sorting all rows by time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from relive.errors import SchemaError, explain
from relive.replay.backend import Backend
from relive.schema.conversion import as_numpy_if_cpu, as_tensor, convert, convert_row_ids, path_name
from relive.schema.fields import Schema, select_mutable_fields

PADDING_ID = -1
"""The id of padding in "step_index"."""


def find_slots(backend: Backend, ids: torch.Tensor, *, padded: bool) -> torch.Tensor:
    """Return the flat slots of ids [K]; -1 for overwritten rows and, with `padded`, for the id -1, which is padding.

    Raises an IndexError for ids that were never issued.
    """
    if not padded:
        return backend.locate(ids)
    is_padding = ids == PADDING_ID
    if backend.device.type != "cpu":
        # Padding is located too, because selecting by a mask would synchronise.
        return backend.locate(ids).masked_fill(is_padding, -1)
    slots = torch.full_like(ids, -1)
    slots[~is_padding] = backend.locate(ids[~is_padding])
    return slots


def _count_true(mask: torch.Tensor) -> int | torch.Tensor:
    """Return the number of True items; a tensor on devices other than the CPU."""
    total = as_numpy_if_cpu(mask).sum()
    return total if isinstance(total, torch.Tensor) else int(total)


def flatten_ids(index: Any, device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the ids `index` [B] or [B, L] as int64 [K], and their shape."""
    if not isinstance(index, torch.Tensor) or index.ndim != 1:
        index = as_tensor("index", index, device).to(device)
    ids = convert_row_ids(index.reshape(-1) if index.ndim == 2 else index, device)
    return ids, tuple(index.shape)


def convert_values(backend: Backend, ids_shape: tuple[int, ...], leaves: Mapping[int, Any]) -> dict[int, torch.Tensor]:
    """Convert values of leaves [*ids_shape, …] to tensors [K, …] of the fields' dtypes."""
    values = {}
    for i, value in leaves.items():
        field, where = backend.schema.fields[i], path_name(backend.schema.paths[i])
        tensor = convert(where, field, value, ids_shape, backend.device, unit="rows")
        values[i] = tensor.reshape(math.prod(ids_shape), *field.shape)
    return values


def write_mutable_leaves(
    backend: Backend, ids: torch.Tensor, ids_shape: tuple[int, ...], leaves: Mapping[int, Any], *, padded: bool = False
) -> Any:
    """Overwrite mutable leaves of the rows with ids [K]; returns how many rows were stale and skipped.

    `ids_shape` is the caller's shape of the ids. The id -1 is padding if this shape is (B, L) or `padded` is true.
    """
    padded = padded or len(ids_shape) == 2
    values = convert_values(backend, ids_shape, leaves)
    # Ids are resolved after the conversion, because the conversion may run a caller's code that adds rows.
    slots = find_slots(backend, ids, padded=padded)
    # Without rows there is nothing to write, and an empty tensor may have strides that the native core rejects.
    if len(slots):
        backend.rewrite(slots, values)
    num_skipped = _count_true(slots < 0)
    return num_skipped - _count_true(ids == PADDING_ID) if padded else num_skipped


def flatten_mutable_fields(schema: Schema, fields: Mapping[str, Any]) -> dict[int, Any]:
    """Return the leaves of fields by their index in the schema; raises if a field is not mutable."""
    mutable = select_mutable_fields(schema)
    names = ", ".join(mutable.names) or "none is declared"
    if not fields:
        remedy = "Pass the new values by name."
        raise SchemaError(explain("write", f"at least one Mutable field ({names})", "no field", remedy))
    leaves: dict[int, Any] = {}
    for name, value in fields.items():
        schema.check_declared(name)
        if name not in mutable.names:
            remedy = "Declare it as rl.Mutable(…), if it is not an observation."
            raise SchemaError(explain(name, f"a Mutable field ({names})", "a field that never changes", remedy))
        paths = (mutable.paths[i] for i in mutable.leaf_indices[name])
        leaves |= dict(zip(map(schema.paths.index, paths), mutable.flatten(name, value), strict=True))
    return leaves


def update_priorities(backend: Backend, sampler: Any, index: Any, priority: torch.Tensor) -> Any:
    """Set the priorities of the rows `index`; returns how many rows were stale and skipped."""
    ids, ids_shape = flatten_ids(index, backend.device)
    padded = len(ids_shape) == 2
    rows = ids if sampler.updates_by_id else find_slots(backend, ids, padded=padded)
    if not padded:
        return sampler.update(rows, priority)
    if tuple(priority.shape) != ids_shape:
        remedy = "Pass a priority for each step."
        raise SchemaError(explain("priority", f"shape {ids_shape}", tuple(priority.shape), remedy))
    is_padding = ids == PADDING_ID
    # A network may compute NaN priorities for padding steps, which `update` would refuse, so they are replaced by 0.
    return sampler.update(rows, priority.reshape(-1).masked_fill(is_padding, 0)) - _count_true(is_padding)


def sort_rows_by_time(backend: Backend) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ids and slots of all transitions, sorted by environment and time, and a mask of episode starts.

    The mask is True for the first stored transition of each episode.
    """
    ring, slots = backend.ring, backend.stored()
    ids = backend.ids(slots)
    env, row = ids % ring.num_envs, ids // ring.num_envs
    order = torch.argsort(env * (int(row.max()) + 1 if len(row) else 1) + row)
    ids, slots = ids[order], slots[order]
    follows = (ids[1:] == ids[:-1] + ring.num_envs).nonzero().squeeze(1) + 1
    starts = torch.ones_like(slots, dtype=torch.bool).index_fill(0, follows, False)
    return ids, slots, starts | ring.first.view(-1)[slots]
