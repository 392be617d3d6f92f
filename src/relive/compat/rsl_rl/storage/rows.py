"""Steps written straight into the memory of a core, as a collector does that the memory is lent to.

rsl_rl's storage copies a handful of tensors at every step; checking them as `RolloutBuffer.add` does would take longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relive.errors import SchemaError, explain
from relive.fields.conversion import convert
from relive.fields.schema import Field


class Rows:
    """Tensors `[T, N, …]` by the names that errors use, written row by row."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._names = tuple(tensors)
        self._tensors = tuple(tensors.values())
        self._rows: dict[int, list[torch.Tensor]] = {}

    def write(self, step: int, values: Sequence[Any]) -> None:
        """Copy a value into the row of each tensor; if one does not fit, no row changes."""
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = [tensor[step] for tensor in self._tensors]
        given = [
            value
            if type(value) is torch.Tensor
            and value.shape == place.shape
            and value.dtype is place.dtype
            and not value.requires_grad
            else _fitted(name, value, place)
            for name, place, value in zip(self._names, row, values, strict=True)
        ]
        torch._foreach_copy_(row, given)


def _fitted(name: str, value: Any, place: torch.Tensor) -> torch.Tensor:
    """The value as a tensor that the place takes, from whatever device, or an error that says why not."""
    if value is None:
        raise SchemaError(explain(name, "a tensor", None, "Set it before add_transition."))
    here = value.to(place.device) if isinstance(value, torch.Tensor) else value
    return convert(name, Field(place.shape[1:], place.dtype), here, tuple(place.shape[:1]), place.device)
