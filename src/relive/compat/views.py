"""Attributes, dicts and TensorDicts that are writable memory of the core, and functions of trees of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from relive.errors import SchemaError, explain
from relive.schema.checks import check_keys, check_shape, type_name
from relive.schema.conversion import memory_overlaps
from relive.schema.fields import Field


class MemoryView:
    """A descriptor of an attribute that shows memory of its buffer; an assignment copies into the memory.

    `_get_memory(name)` of the buffer returns the memory: a tensor or an array, or a dict, TensorDict, tuple or list of
    them. A buffer with a method `_set_memory(name, value)` handles assignments itself.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, owner: type | None = None) -> Any:
        if buffer is None:
            return self
        memory = buffer._get_memory(self._name)
        return WriteThroughDict(self._name, memory) if type(memory) is dict else memory

    def __set__(self, buffer: Any, value: Any) -> None:
        assign_name = getattr(buffer, "_set_memory", None)
        if assign_name is not None:
            assign_name(self._name, value)
        else:
            copy_into_memory(self._name, buffer._get_memory(self._name), value)


def make_memory_views(*names: str) -> tuple[Any, ...]:
    """Make a `MemoryView` per name."""
    return tuple(map(MemoryView, names))


class WriteThroughDict(dict[str, Any]):
    """A dict of memory: assigning to a key writes into its memory. A pickle or copy is a plain dict."""

    def __init__(self, where: str, memory: Mapping[str, Any]) -> None:
        super().__init__(memory)
        self._where = where

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self:
            raise KeyError(explain(self._where, f"one of {sorted(self)}", key, "Assign to one of them."))
        copy_into_memory(f"{self._where}.{key}", self[key], value)

    def update(self, *others: Any, **named: Any) -> None:
        """Assign to several keys."""
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, items: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(items)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class WriteThroughTensorDict(TensorDict):
    """A locked TensorDict of memory: `memory["rewards"] = x` copies into it, so `memory["rewards"] += 1` works.

    New names are refused. Slices and copies are ordinary, unlocked TensorDicts.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        is_name = isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(part, str) for part in key))
        if not (is_name and self.is_locked):
            super().__setitem__(key, value)
        elif value is not self.get(key):
            self.set_(key, value)


def copy_into_memory(where: str, memory: Any, value: Any) -> None:
    """Copy a value into memory of the same structure and shapes; an error leaves the memory unchanged.

    Raises a SchemaError for numbers that memory of integers or bools cannot hold.
    """
    for part, converted in list(_convert_parts(where, memory, value)):
        part[...] = converted


def _convert_parts(where: str, memory: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each tensor or array of the memory with its new content; skip memory that is assigned to itself."""
    if value is memory:
        return
    if memory is None:
        remedy = "Declare the field, or add a step that has it."
        raise SchemaError(explain(where, "a field of this buffer", "one without memory", remedy))
    parts = _get_parts(memory)
    if parts is not None:
        new_parts: Any = dict(enumerate(value)) if isinstance(value, tuple | list) else value
        check_keys(where, new_parts, parts.keys(), remedy="Assign every part.")
        for key, part in parts.items():
            yield from _convert_parts(f"{where}.{key}", part, new_parts[key])
        return
    is_tensor = isinstance(memory, torch.Tensor)
    try:
        new: Any = torch.as_tensor(value, device=memory.device).detach() if is_tensor else np.asarray(value)
        check_shape(where, new, memory.shape, "Assign every step.")
        converted = new.to(memory.dtype) if is_tensor else new.astype(memory.dtype)
    except (TypeError, RuntimeError) as error:
        # Values that are not made of numbers, such as strings and ragged lists, raise one of these errors.
        expected = f"numbers of shape {tuple(memory.shape)}"
        raise SchemaError(explain(where, expected, type_name(value), "Assign every step.")) from error
    is_float = memory.is_floating_point() if is_tensor else memory.dtype.kind == "f"
    if not is_float and (converted != new).any():
        remedy = "Convert them, or declare a field that holds them."
        raise SchemaError(explain(where, f"numbers of {memory.dtype}", f"others, of {new.dtype}", remedy))
    yield memory, converted


def _get_parts(tree: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a dict, TensorDict, tuple or list by key or number; None for any other value."""
    if isinstance(tree, tuple | list):
        return dict(enumerate(tree))
    return tree if is_tree(tree) else None


_TENSOR: Any = torch.Tensor
# `Mapping` is last because its isinstance check is slow.
_TREES = (dict, TensorDict, Mapping)


def is_tree(value: Any) -> bool:
    """Whether a value is a dict or TensorDict."""
    return isinstance(value, _TREES)


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to each leaf of a tree and the leaves of other trees at the same keys; return dicts."""
    if type(tree) is _TENSOR or not is_tree(tree):
        return function(tree, *others)
    # `add` maps a single tree in every step, so a call without other trees has a faster path.
    if not others:
        return {key: map_tree(function, part) for key, part in tree.items()}
    return {key: map_tree(function, part, *(other[key] for other in others)) for key, part in tree.items()}


def declare_spec(spec: Any, dtype: Any = torch.float32) -> Any:
    """Declare fields for the core from a shape or a dict of shapes; leaves without their own dtype get `dtype`.

    `dtype` may be a dict with the keys of `spec`.
    """
    if isinstance(spec, Mapping):
        dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(spec, dtype)
        return {key: declare_spec(part, dtypes[key]) for key, part in spec.items()}
    return Field(spec.shape, spec.dtype) if hasattr(spec, "dtype") else Field(spec, dtype)


def list_named_leaves(name: str, tree: Any) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a tree with their dotted names."""
    if not is_tree(tree):
        return [(name, tree)]
    return [leaf for key, part in tree.items() for leaf in list_named_leaves(f"{name}.{key}", part)]


def gather_rows(index: torch.Tensor, rows: Any) -> Any:
    """Gather the rows `index` of a tensor or TensorDict; return None for None."""
    return rows.index_select(0, index) if isinstance(rows, torch.Tensor) else None if rows is None else rows[index]


def is_memory_shared(obs: Any, next_obs: Any) -> bool:
    """Whether two observations share memory."""
    if not isinstance(obs, torch.Tensor) or not isinstance(next_obs, torch.Tensor):
        return memory_overlaps(obs, next_obs)
    distance = next_obs.data_ptr() - obs.data_ptr()
    num_bytes = (obs if distance >= 0 else next_obs).nbytes
    return abs(distance) < num_bytes and memory_overlaps(obs, next_obs)


def as_bools(value: Any) -> torch.Tensor | np.ndarray:
    """Convert numbers to bools: all numbers except zero are True."""
    if isinstance(value, torch.Tensor):
        return value if value.dtype is torch.bool else value != 0
    return np.asarray(value) != 0
