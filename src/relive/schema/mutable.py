"""Fields of a stored row that may be written again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from relive import lazy
from relive.errors import SchemaError, explain
from relive.schema.fields import Carry, Declaration, Field, Path, Schema, Tree, declare


@dataclass(frozen=True, init=False)
class Mutable(Field):
    """A field of a replay buffer's rows that `ReplayBuffer.write` may write again: latent states, relabelled rewards.

    Every leaf but those of an observation, which is also the next observation of another row, can be one. Checkpoints
    save mutable fields whole each time; all other fields are saved once.

    Args:
        field: what is stored: a shape, a `Field` or a `Carry`. Of a dict, each leaf is declared by itself.

    >>> Mutable(32)
    Mutable(shape=(32,), dtype=torch.float32, field=Field(shape=(32,), dtype=torch.float32))
    """

    field: Field

    def __init__(self, field: Declaration) -> None:
        inner = declare("Mutable", field)
        if type(inner) not in (Field, Carry):
            got = "a dict" if isinstance(inner, dict) else inner
            remedy = "Declare the leaves of a dict as Mutable one by one."
            raise SchemaError(explain("Mutable", "one Field or Carry", got, remedy))
        assert isinstance(inner, Field)
        super().__init__(inner.shape, inner.dtype)
        object.__setattr__(self, "field", inner)

    def settings(self) -> list[Any]:
        kind, _, _, *settings = self.field.config()
        return [kind, *settings]

    @classmethod
    def with_settings(cls, plain: Field, settings: list[lazy.Node]) -> Mutable:
        kind, *rest = settings
        return cls(Field.kinds[kind.one_of(("field", "carry"))].with_settings(plain, rest))


def is_carried(field: Field) -> bool:
    """Whether sequences return a field only at their start."""
    return isinstance(field.field if isinstance(field, Mutable) else field, Carry)


@lru_cache(maxsize=64)  # asked at every write
def mutable_schema(schema: Schema) -> Schema:
    """The mutable leaves of a schema, as a schema of their own."""
    pruned = {name: _pruned(tree) for name, tree in schema.trees.items()}
    return Schema({name: tree for name, tree in pruned.items() if tree is not None})


def _pruned(tree: Tree) -> Tree | None:
    """The mutable leaves of a declaration; None if it has none."""
    if isinstance(tree, Field):
        return tree if isinstance(tree, Mutable) else None
    pruned = {name: _pruned(child) for name, child in tree.items()}
    return {name: child for name, child in pruned.items() if child is not None} or None


def refuse_mutable(schema: Schema, names: Iterable[str], expected: str, remedy: str) -> None:
    """Raise if a leaf of one of the fields `names` is mutable."""
    mutable: tuple[Path, ...] = mutable_schema(schema).paths
    for path in mutable:
        if path[0] in names:
            raise SchemaError(explain(".".join(path), expected, "Mutable", remedy))
