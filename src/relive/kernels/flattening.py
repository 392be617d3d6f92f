"""Flattening of a step into its leaves: one native call for plain dicts, tuples and lists."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from typing import Any

from relive import kernels
from relive.errors import SchemaError, explain
from relive.schema.fields import Field, Schema, Tree


class Flattening:
    """Flattens the fields of a step in the schema's order.

    Args:
        schema: declares the fields.
        positional: names of the required fields, passed by position.
        named: names of the optional fields, passed by name.
    """

    def __init__(self, schema: Schema, positional: Sequence[str], named: Sequence[str] = ()) -> None:
        self._schema, self._positional, self._named = schema, tuple(positional), tuple(named)
        native = kernels.native()
        trees = ({name: _nesting(schema.trees[name]) for name in names} for names in (positional, named))
        self._native = None if native is None else native.Flattener(*trees)

    def __call__(self, values: tuple[Any, ...], extra: dict[str, Any]) -> tuple[Any, ...]:
        """Return the leaves of all fields. Raises a SchemaError that names an undeclared key or field."""
        leaves = None if self._native is None else self._native.flatten(values, extra)
        return tuple(chain.from_iterable(self.by_field(values, extra).values())) if leaves is None else leaves

    def by_field(
        self, values: tuple[Any, ...], extra: dict[str, Any], staged: Container[str] = ()
    ) -> dict[str, tuple[Any, ...]]:
        """Return the leaves of each field that is not staged. Raises if a staged field is passed again."""
        schema, leaves = self._schema, {}
        for name in extra:
            schema.require(name)
        names = (*self._positional, *self._named)
        for name, value in zip(names, (*values, *map(extra.get, self._named)), strict=True):
            if name not in staged:
                leaves[name] = schema.flatten(name, value)
            elif value is not None:
                remedy = "It is staged already: leave it out."
                raise SchemaError(explain(name, "one value per step", "a second value", remedy))
        return leaves


def _nesting(tree: Tree) -> Any:
    """The nested names of a field's parts; None for a leaf."""
    return None if isinstance(tree, Field) else {name: _nesting(part) for name, part in tree.items()}
