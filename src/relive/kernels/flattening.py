"""From the values of a step to its leaves: one native call for plain dicts, tuples and lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relive import kernels
from relive.schema.fields import Field, Schema, Tree


class Flattening:
    """Flattens the fields of a step in the schema's order.

    Args:
        schema: declares the fields.
        positional: the names of the fields whose values are always passed.
        named: the names of the fields that come after them, whose values are passed by name or left out.
    """

    def __init__(self, schema: Schema, positional: Sequence[str], named: Sequence[str] = ()) -> None:
        self._schema, self._positional, self._named = schema, tuple(positional), tuple(named)
        native = kernels.native()
        trees = ({name: _nesting(schema.trees[name]) for name in names} for names in (positional, named))
        self._native = None if native is None else native.Flattener(*trees)

    def __call__(self, values: tuple[Any, ...], extra: dict[str, Any]) -> tuple[Any, ...]:
        """The leaves of all fields; a SchemaError says which key or name is not as declared."""
        leaves = None if self._native is None else self._native.flatten(values, extra)
        return self._explained(values, extra) if leaves is None else leaves

    def _explained(self, values: tuple[Any, ...], extra: dict[str, Any]) -> tuple[Any, ...]:
        """The same of any mapping, with errors that say what is wrong."""
        schema = self._schema
        for name in extra:
            schema.require(name)
        named = zip((*self._positional, *self._named), (*values, *map(extra.get, self._named)), strict=True)
        return tuple(leaf for name, value in named for leaf in schema.flatten(name, value))


def _nesting(tree: Tree) -> Any:
    """The names of a field's parts, nested likewise; None for a leaf."""
    return None if isinstance(tree, Field) else {name: _nesting(part) for name, part in tree.items()}
