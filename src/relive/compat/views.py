"""Attributes of the adapters' buffers that are memory of the core, and the trees of tensors that they may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from relive.errors import SchemaError, explain
from relive.schema.checks import same_shape
from relive.schema.fields import Field


class HasMemory(Protocol):
    """A buffer with `MemoryView`s. It may also have `_assign(name, value)`, which takes the assignments."""

    def _memory_of(self, field: str, /) -> Any: ...


class MemoryView:
    """An attribute that is memory of its buffer. Assigning to it writes into the memory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, owner: type | None = None) -> Any:
        return self if buffer is None else buffer._memory_of(self._name)

    def __set__(self, buffer: Any, value: Any) -> None:
        own = getattr(buffer, "_assign", None)
        if own is not None:
            own(self._name, value)
        else:
            assign(self._name, buffer._memory_of(self._name), value)


def memory_views(*names: str) -> tuple[Any, ...]:
    """A `MemoryView` of each of these names."""
    return tuple(map(MemoryView, names))


class WrittenDict(dict[str, Any]):
    """Memory by key, which stays: assigning to a key writes. A copy is a plain dict."""

    def update(self, *others: Any, **named: Any) -> None:
        """Assign to several keys."""
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, others: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(others)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def assign(where: str, place: Any, value: Any) -> None:
    """Write a value into memory of its form; a tensor that is this memory needs no copy."""
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
    given = torch.as_tensor(value, device=place.device)
    same_shape(where, given, place.shape, "Assign a tensor of the expected shape.")
    if given.dtype.is_floating_point and not place.dtype.is_floating_point:
        raise SchemaError(explain(where, place.dtype, given.dtype, "Convert it."))
    place.copy_(given.detach())


_TENSOR: Any = torch.Tensor
_TREES = (dict, TensorDict, Mapping)  # an abstract class last: to ask it takes as long as the copy of a small step


def is_tree(value: Any) -> bool:
    """Whether this is a dict or TensorDict."""
    return isinstance(value, _TREES)


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The results of a function for each leaf of a tree, and for the leaves of other trees at its keys, as dicts."""
    if type(tree) is _TENSOR or not is_tree(tree):
        return function(tree, *others)
    if not others:  # most trees: rows on their way into a buffer
        return {key: map_tree(function, part) for key, part in tree.items()}
    return {key: map_tree(function, part, *(other[key] for other in others)) for key, part in tree.items()}


def declare(spec: Any, dtype: Any = torch.float32) -> Any:
    """The core's declaration of a shape, or of a dict of shapes; leaves without a dtype of their own have `dtype`.

    A `dtype` that is a dict has one for each key.
    """
    if isinstance(spec, Mapping):
        each = dtype if isinstance(dtype, Mapping) else dict.fromkeys(spec, dtype)
        return {key: declare(part, each[key]) for key, part in spec.items()}
    return Field(spec.shape, spec.dtype) if hasattr(spec, "dtype") else Field(spec, dtype)


def named_leaves(name: str, tree: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a tree with their dotted names."""
    if not is_tree(tree):
        return [(name, tree)]
    return [leaf for key, part in tree.items() for leaf in named_leaves(f"{name}.{key}", part)]


def rows_at(index: torch.Tensor, rows: Any) -> Any:
    """The rows `index` of a tensor, or of every tensor of a TensorDict; None of None."""
    return rows.index_select(0, index) if isinstance(rows, torch.Tensor) else None if rows is None else rows[index]
