"""Checksum of the whole state of a buffer: memory, numbers and generators."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

CACHES = {
    "_lock",
    "_views",  # readers of views
    "_continuity",  # observes steps before they are stored; its counts are not buffer state
    "_reused_memory",
    "_declared",
    "_env_id_converter",
    "_readers",
    "_reader",
    "_paths",
    "_few_slots",
    "_running",
    "_slice_starts",
    "_row_table",
    "_rows_left",
    "_uniform_index",
    "_last_draw",
    "_written",
    "first_ids",
    "_cached_fit",
    "_build",
    "is_exposed",
}
"""Attributes that are caches or do not affect stored data."""
PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
"""Types compared by `repr`. Tested first: `isinstance` of a torch type is slow."""


def digest(*things: Any) -> str:
    """Return the checksum of objects and everything that they refer to."""
    total = hashlib.sha256()
    _add(total, things, {})
    return total.hexdigest()


def _add(total: Any, thing: Any, seen: dict[int, Any]) -> None:
    if type(thing) in PLAIN or isinstance(thing, int | float | str | torch.dtype | type):
        total.update(repr(thing).encode())
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # keeps the object alive: `id` is unique only among living objects
    total.update(type(thing).__name__.encode())
    total.update(_memory(thing))
    for part in _parts(thing):
        _add(total, part, seen)


def _memory(thing: Any) -> bytes:
    """Return the raw contents of an object as bytes."""
    if isinstance(thing, torch.Tensor):
        plain = thing.device.type == "cpu" and thing.layout == torch.strided
        bits = b""
        if plain:  # copied: a single element may have any stride, which a view as bytes refuses
            whole = thing.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
            bits = whole.view(-1).view(torch.uint8).numpy().tobytes()
        return repr((thing.dtype, thing.shape, thing.layout)).encode() + bits
    if isinstance(thing, np.ndarray | np.generic):
        return repr((thing.dtype, thing.shape)).encode() + (b"" if thing.dtype == object else thing.tobytes())
    if isinstance(thing, np.random.BitGenerator):
        return repr(thing.state).encode()
    if isinstance(thing, torch.Generator):
        return thing.get_state().numpy().tobytes()
    if hasattr(thing, "leaves_view"):  # a priority tree of the native core
        return repr((float(thing.total_priority()), float(thing.max_sum_error()))).encode()
    return b""


def _parts(thing: Any) -> list[Any]:
    """Return the objects that an object refers to."""
    if isinstance(thing, Mapping | TensorDictBase):
        return [part for item in thing.items() for part in item]
    if isinstance(thing, list | tuple):
        return list(thing)
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if type(thing).__module__.startswith("relive.") and hasattr(thing, "__dict__"):
        return [part for item in vars(thing).items() if item[0] not in CACHES for part in item]
    return []
