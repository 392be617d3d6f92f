"""Attributes that are memory of the core, and functions of trees of tensors (dicts and TensorDicts)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from relive.errors import SchemaError, explain
from relive.schema.checks import check_shape
from relive.schema.fields import Field


class HasMemory(Protocol):
    """A buffer with `MemoryView`s. An optional method `_assign(name, value)` handles assignments."""

    def _memory_of(self, field: str, /) -> Any: ...


class MemoryView:
    """A descriptor of an attribute that is memory of its buffer. Assigning to it writes into the memory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, owner: type | None = None) -> Any:
        return self if buffer is None else buffer._memory_of(self._name)

    def __set__(self, buffer: Any, value: Any) -> None:
        assign_name = getattr(buffer, "_assign", None)
        if assign_name is not None:
            assign_name(self._name, value)
        else:
            assign(self._name, buffer._memory_of(self._name), value)


def memory_views(*names: str) -> tuple[Any, ...]:
    """Make a `MemoryView` per name."""
    return tuple(map(MemoryView, names))


class WriteThroughDict(dict[str, Any]):
    """Base class of dicts of memory: assigning to a key writes into its memory. A pickle or copy is a plain dict."""

    def update(self, *others: Any, **named: Any) -> None:
        """Assign to several keys."""
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, items: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(items)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def assign(where: str, place: Any, value: Any) -> None:
    """Copy a value into memory of the same structure; nothing to do if it is that memory."""
    if value is place:
        return
    if place is None:
        raise SchemaError(explain(where, "a field of this buffer", "an undeclared field", "Declare the field."))
    if is_tree(place):
        for key in value.keys():
            if key not in place.keys():
                raise SchemaError(explain(where, f"the keys {sorted(place.keys())}", key, "Declare the key."))
            assign(f"{where}.{key}", place[key], value[key])
        return
    tensor = torch.as_tensor(value, device=place.device)
    check_shape(where, tensor, place.shape, "Assign a tensor of the expected shape.")
    if tensor.dtype.is_floating_point and not place.dtype.is_floating_point:
        raise SchemaError(explain(where, place.dtype, tensor.dtype, "Convert it."))
    place.copy_(tensor.detach())


_TENSOR: Any = torch.Tensor
_TREES = (dict, TensorDict, Mapping)  # Mapping last: its isinstance check is slow


def is_tree(value: Any) -> bool:
    """Whether a value is a dict or TensorDict."""
    return isinstance(value, _TREES)


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to each leaf of a tree, and to the leaves of other trees at the same keys; returns dicts."""
    if type(tree) is _TENSOR or not is_tree(tree):
        return function(tree, *others)
    if not others:  # a single tree: fast path, used by `add`
        return {key: map_tree(function, part) for key, part in tree.items()}
    return {key: map_tree(function, part, *(other[key] for other in others)) for key, part in tree.items()}


def declare(spec: Any, dtype: Any = torch.float32) -> Any:
    """Declare a shape, or a dict of shapes, for the core; leaves without their own dtype get `dtype`.

    `dtype` may be a dict with the keys of `spec`.
    """
    if isinstance(spec, Mapping):
        each = dtype if isinstance(dtype, Mapping) else dict.fromkeys(spec, dtype)
        return {key: declare(part, each[key]) for key, part in spec.items()}
    return Field(spec.shape, spec.dtype) if hasattr(spec, "dtype") else Field(spec, dtype)


def named_leaves(name: str, tree: Any) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a tree with their dotted names."""
    if not is_tree(tree):
        return [(name, tree)]
    return [leaf for key, part in tree.items() for leaf in named_leaves(f"{name}.{key}", part)]


def rows_at(index: torch.Tensor, rows: Any) -> Any:
    """Gather the rows `index` of a tensor or TensorDict; None gives None."""
    return rows.index_select(0, index) if isinstance(rows, torch.Tensor) else None if rows is None else rows[index]
