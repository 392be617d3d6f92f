"""A checksum of everything that a buffer is: its memory, its numbers, its generators."""

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
    "_continuity",  # looks at steps before they are stored; what it knows is no part of the buffer
    "_reused_memory",
    "_declared",
    "_environments",
    "_readers",
    "_reader",
    "_few",
    "_running",
    "_slice_starts",
    "_row_table",
    "_rows_left",
    "_queues",
    "_drawn",
    "_written",
    "first_ids",
    "_cached_fit",
    "_row_views",
    "_build",
    "is_exposed",
    "_counted_columns",
}
"""What is made anew from the rest, or means nothing to what is stored."""
PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
"""What is told by its `repr`. Asked for first: `isinstance` of a type of torch is slow."""


def digest(*things: Any) -> str:
    """The checksum of things and of all that they refer to."""
    total = hashlib.sha256()
    _add(total, things, {})
    return total.hexdigest()


def _add(total: Any, thing: Any, seen: dict[int, Any]) -> None:
    if type(thing) in PLAIN or isinstance(thing, int | float | str | torch.dtype | type):
        total.update(repr(thing).encode())
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # kept: a number is of one thing only as long as that lives
    total.update(type(thing).__name__.encode())
    total.update(_memory(thing))
    for part in _parts(thing):
        _add(total, part, seen)


def _memory(thing: Any) -> bytes:
    """What a thing holds that is no object."""
    if isinstance(thing, torch.Tensor):
        plain = thing.device.type == "cpu" and thing.layout == torch.strided
        bits = b""
        if plain:  # in new memory: a single number may have any stride, which a view of its bytes minds
            whole = thing.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
            bits = whole.view(-1).view(torch.uint8).numpy().tobytes()
        return repr((thing.dtype, thing.shape, thing.layout)).encode() + bits
    if isinstance(thing, np.ndarray | np.generic):
        return repr((thing.dtype, thing.shape)).encode() + (b"" if thing.dtype == object else thing.tobytes())
    if isinstance(thing, np.random.BitGenerator):
        return repr(thing.state).encode()
    if isinstance(thing, torch.Generator):
        return thing.get_state().numpy().tobytes()
    if hasattr(thing, "leaves_view"):  # a priority tree, whose sums native code keeps
        return repr((float(thing.total()), float(thing.check()))).encode()
    return b""


def _parts(thing: Any) -> list[Any]:
    """What a thing refers to."""
    if isinstance(thing, Mapping | TensorDictBase):
        return [part for item in thing.items() for part in item]
    if isinstance(thing, list | tuple):
        return list(thing)
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if type(thing).__module__.startswith("relive.") and hasattr(thing, "__dict__"):
        return [part for item in vars(thing).items() if item[0] not in CACHES for part in item]
    return []
