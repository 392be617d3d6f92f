"""Steps passed by a caller: flattening a step into leaves, and copying its leaves into one row of many tensors."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from relive import kernels
from relive.errors import SchemaError, explain
from relive.schema.fields import Field, Schema, Tree


class StepFlattener:
    """Flattens the fields of a step in the schema's order, in one native call for plain dicts, tuples and lists.

    Args:
        schema: declares the fields.
        positional: names of the required fields, passed by position.
        named: names of the optional fields, passed by name.
    """

    def __init__(self, schema: Schema, positional: Sequence[str], named: Sequence[str] = ()) -> None:
        self._schema, self._positional, self._named = schema, tuple(positional), tuple(named)
        native = kernels.native_core()
        trees = ({name: _to_nested_dicts(schema.trees[name]) for name in names} for names in (positional, named))
        self._native = None if native is None else native.Flattener(*trees)

    def __call__(self, values: tuple[Any, ...], extra: dict[str, Any]) -> tuple[Any, ...]:
        """Return the leaves of all fields. Raises a SchemaError that names an undeclared key or field."""
        leaves = None if self._native is None else self._native.flatten(values, extra)
        return tuple(chain.from_iterable(self.flatten_by_field(values, extra).values())) if leaves is None else leaves

    def flatten_by_field(
        self, values: tuple[Any, ...], extra: dict[str, Any], staged_names: Container[str] = ()
    ) -> dict[str, tuple[Any, ...]]:
        """Return the leaves of each field that is not staged. Raises if a staged field is passed again."""
        schema, leaves = self._schema, {}
        for name in extra:
            schema.check_declared(name)
        names = (*self._positional, *self._named)
        for name, value in zip(names, (*values, *map(extra.get, self._named)), strict=True):
            if name not in staged_names:
                leaves[name] = schema.flatten(name, value)
            elif value is not None:
                remedy = "It is staged already: leave it out."
                raise SchemaError(explain(name, "one value per step", "a second value", remedy))
        return leaves


def _to_nested_dicts(tree: Tree) -> Any:
    """Return a tree of fields as nested dicts, with None for each leaf."""
    return None if isinstance(tree, Field) else {name: _to_nested_dicts(part) for name, part in tree.items()}


class RowWriter(Protocol):
    """Writes rows of tensors [rows, N, …], in one native call or in two torch operations.

    A tensor with a single row keeps only the newest step.
    """

    def write(self, row: int, leaves: tuple[Any, ...], columns: tuple[int, ...] | None = None) -> int:
        """Copy leaves as passed by the caller. Return -1, or the position of a leaf that needs conversion.

        Either all leaves are written or none. A leaf of None writes zeros into an optional tensor. `columns` are the
        indices of the tensors to write; by default all are written.
        """
        ...

    def write_converted(
        self, row: int, leaves: tuple[torch.Tensor | None, ...], columns: tuple[int, ...] | None
    ) -> int:
        """Copy converted leaves. Return -1, or the position of a leaf whose memory cannot be read."""
        ...

    def have_moved(self) -> bool:
        """Whether the memory of a tensor has moved since construction, as after `share_memory_`."""
        ...


def make_row_writer(tensors: Sequence[torch.Tensor], is_optional: Sequence[bool], *, has_env_axis: bool) -> RowWriter:
    """Make a writer into these tensors. Without an environment axis (N = 1), leaves lack the axis N."""
    if not kernels.runs_native(tensors):
        return _TorchRows(tensors, has_env_axis)
    return _NativeRows(kernels.native_core().Columns(list(tensors), list(is_optional), 0 if has_env_axis else 1))


class _NativeRows:
    def __init__(self, columns: Any) -> None:
        self.write = self.write_converted = columns.write
        self.have_moved = columns.have_moved


class _TorchRows:
    def __init__(self, tensors: Sequence[torch.Tensor], has_env_axis: bool) -> None:
        self._tensors = [tensor if has_env_axis else tensor.squeeze(1) for tensor in tensors]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._views: list[tuple[torch.Tensor, ...]] = []

    def have_moved(self) -> bool:
        return [tensor.data_ptr() for tensor in self._tensors] != self._addresses

    def write(self, row: int, leaves: tuple[Any, ...], columns: tuple[int, ...] | None = None) -> int:
        """Return 0, because every leaf needs conversion, or -1 if there are no leaves."""
        return 0 if leaves else -1

    def write_converted(
        self, row: int, leaves: tuple[torch.Tensor | None, ...], columns: tuple[int, ...] | None
    ) -> int:
        if not self._views:
            # The views of all rows are cached: a step then takes only two torch operations.
            rows = max(map(len, self._tensors))
            # Views made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                views = [tuple(map(_as_words, tensor.unbind(0))) * (rows // len(tensor)) for tensor in self._tensors]
            self._views = list(zip(*views, strict=True))
        views = self._views[row]
        pairs = list(zip(views if columns is None else [views[i] for i in columns], leaves, strict=True))
        missing = [view for view, leaf in pairs if leaf is None]
        for word in (torch.int32, torch.uint8):
            copies = [(view, _as_words(leaf)) for view, leaf in pairs if leaf is not None and view.dtype == word]
            if copies:
                torch._foreach_copy_([view for view, _ in copies], [leaf for _, leaf in copies])
        if missing:
            torch._foreach_zero_(missing)
        return -1


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat int32, or as bytes if its elements are shorter than four bytes.

    Devices copy many tensors in one launch only if all have the same dtype.
    """
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.view(-1).view(torch.int32 if tensor.element_size() % 4 == 0 else torch.uint8)
