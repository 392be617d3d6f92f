"""Declarations read from files: JSON that anybody may have written becomes a tree of fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relive.fields.schema import DTYPES, Field, Path, Tree

if TYPE_CHECKING:
    from relive.memory.documents import Node

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def tree_of(node: Node) -> Tree:
    """The declaration that `config_of` made JSON of; a CorruptCheckpoint says what cannot be one."""
    if isinstance(node.value, dict):
        if not node.value:
            raise node.wrong("at least one field")
        return {name: tree_of(child) for name, child in node.entries().items()}
    parts = node.items(8)
    if not parts:
        raise node.wrong("a field")
    kind = Field.kinds[parts[0].one_of(Field.kinds)]
    if len(parts) < 3:
        raise node.wrong("a kind, a shape and a dtype")
    shape, dtype = parts[1].shape(), _DTYPES[parts[2].one_of(_DTYPES)]
    if any(size < 1 for size in shape):
        raise parts[1].wrong("positive sizes")
    try:
        return kind.with_settings(Field(shape, dtype), parts[3:])
    except ValueError as error:  # more settings, or fewer
        raise node.wrong(f"the settings of a {kind.__name__} ({error})") from None


def path_of(node: Node) -> Path:
    """A path to a leaf."""
    names = node.items(64)
    if not names:
        raise node.wrong("at least one name")
    return tuple(name.text() for name in names)
