"""Attributes of the adapters' buffers that are memory of the core: what is assigned to them is written there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from relive.errors import SchemaError, explain
from relive.schema.checks import same_shape


class HasMemory(Protocol):
    """A buffer whose attributes are `MemoryView`s. It may also have `_assign(name, value)`, which takes assignments."""

    def _memory_of(self, name: str) -> Any:
        """The memory that an attribute is."""
        ...


class MemoryView:
    """An attribute that is memory of its buffer; `name` is the attribute's own unless another is given."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, buffer: Any, owner: type | None = None) -> Any:
        return self if buffer is None else buffer._memory_of(self._name)

    def __set__(self, buffer: Any, value: Any) -> None:
        own = getattr(buffer, "_assign", None)
        if own is not None:
            own(self._name, value)
        else:
            assign(self._name, buffer._memory_of(self._name), value)


class WrittenDict(dict[str, Any]):
    """Memory by key, which stays: what is assigned to a key is written. A copy is a plain dict."""

    def update(self, *others: Any, **named: Any) -> None:
        """Assign to several keys."""
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, others: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(others)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


_TREES = (dict, TensorDict, Mapping)  # an abstract class last: to ask it takes as long as the copy of a small step


def is_tree(value: Any) -> bool:
    """Whether this is a dict or TensorDict."""
    return isinstance(value, _TREES)


def assign(where: str, place: Any, value: Any) -> None:
    """Write a value into memory of its form; of a tensor that is this memory nothing is left to do."""
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
