"""How a step of a rollout gets into its row: all at once, or some fields before the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relive.errors import SchemaError, explain
from relive.rollout.storage import Storage


class StepWriter:
    """Writes the fields of a step, once each."""

    def __init__(self, storage: Storage, extra_names: tuple[str, ...]) -> None:
        self._storage, self._schema = storage, storage.schema
        self._extra_names = extra_names
        self.is_plain = storage.schema.is_flat and not self._extra_names
        """Fields are leaves, and there are no extra ones."""
        self.staged: set[str] = set()
        """Fields of the coming step that have been written; always this very set."""

    def stage(self, row: int, fields: Mapping[str, Any]) -> None:
        """Write some fields of a step."""
        leaves: tuple[Any, ...] = ()
        which: tuple[int, ...] = ()
        for name, value in fields.items():
            self._schema.require(name)
            if name in self.staged:
                raise SchemaError(explain(name, "one value per step", "a second value", "Stage it once per step."))
            if value is None:
                raise SchemaError(explain(name, "a value", None, "Leave it out of stage."))
            leaves += self._schema.flatten(name, value)
            which += self._schema.columns[name]
        self._storage.write(row, leaves, which)
        self.staged.update(fields)

    def write(self, row: int, values: tuple[Any, ...], extra: dict[str, Any]) -> None:
        """Write the fields of a step that are not staged."""
        if extra or self._extra_names:
            for name in extra:
                self._schema.require(name)
            values += tuple(map(extra.get, self._extra_names))
        if not self._schema.is_flat:
            flatten = self._schema.flatten
            values = tuple(
                leaf for name, value in zip(self._schema.names, values, strict=True) for leaf in flatten(name, value)
            )
        if self.staged:
            self._write_unstaged(row, values)
        else:
            self._storage.write(row, values)

    def _write_unstaged(self, row: int, leaves: tuple[Any, ...]) -> None:
        which: list[int] = []
        for name in self._schema.names:
            columns = self._schema.columns[name]
            if name not in self.staged:
                which.extend(columns)
            elif any(leaves[i] is not None for i in columns):
                raise SchemaError(
                    explain(name, "one value per step", "a second value", "It is staged already: leave it out.")
                )
        self._storage.write(row, tuple(leaves[i] for i in which), tuple(which))
