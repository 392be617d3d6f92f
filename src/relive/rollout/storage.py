"""Where the data is: one tensor a leaf, written a whole row at a time or not at all."""

from __future__ import annotations

import math
from typing import Any

import torch

from relive import kernels
from relive.fields.conversion import conform, dotted, light, misplaced, true_flags
from relive.fields.schema import Schema, is_sparse
from relive.memory import Memory


class Storage:
    """Columns `[rows, num_envs, …]`, one for each leaf of the schema, on one device.

    `num_envs=None` keeps an environment axis of length one that callers never see.
    """

    def __init__(
        self, schema: Schema, rows: int, num_envs: int | None, memory: Memory, optional: frozenset[str]
    ) -> None:
        self.schema = schema
        self.lead = () if num_envs is None else (num_envs,)
        """The leading shape of what a caller passes for one row."""
        self.optional = tuple(path[0] in optional for path in schema.paths)
        """Leaves that a caller may leave out: the row is zero there."""
        shapes = [(1 if is_sparse(f) else rows, num_envs or 1, *f.shape) for f in schema.fields]
        kinds = [(shape, field.dtype) for shape, field in zip(shapes, schema.fields, strict=True)]
        memory.require(sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds), "num_steps")
        room = memory.own("RolloutBuffer")
        self.columns = tuple(room.allocate("column", *kind) for kind in kinds)
        """A field that is kept sparsely elsewhere has one row here: the newest."""
        self.device = self.columns[0].device
        self.is_exposed = False
        """Somebody outside has tensors that share the columns' memory."""
        self._bind()
        self._row_views: list[tuple[torch.Tensor, ...]] | None = None

    def _bind(self) -> None:
        self._native = kernels.columns(self.columns, self.optional, lead=1 - len(self.lead))
        self._addresses = [column.data_ptr() for column in self.columns]
        self._arrays = tuple(map(light, self.columns))

    def follow(self) -> bool:
        """Find the columns again if they have moved, as `share_memory_` moves them; returns whether they had."""
        moved = self.is_exposed and [column.data_ptr() for column in self.columns] != self._addresses
        if moved:
            self._row_views = None
            self._bind()
        return moved

    def array(self, column: int, row: int) -> Any:
        """One row [1, N, …] of a column, as an array where it is on the host; the newest of what is kept sparsely."""
        array = self._arrays[column]
        at = row % len(array)
        return array[at : at + 1]

    def write(self, row: int, leaves: tuple[Any, ...], which: tuple[int, ...] | None = None) -> None:
        """Copy one row of all columns (or of the columns `which`); an error leaves the row as it was."""
        if self.is_exposed:
            self.follow()
        native = self._native
        if native is not None and kernels._active is not None:
            misfit = native.write(row, leaves, which)
            if misfit >= 0:
                misfit = native.write(row, tuple(map(kernels.buffer_of, self._conformed(leaves, which))), which)
            if misfit >= 0:
                raise misplaced(dotted(self.schema.paths[misfit if which is None else which[misfit]]))
            return
        self._write_torch(row, self._conformed(leaves, which), which)

    def make_flags(self) -> None:
        """Make bools of whatever somebody else has written into bool columns."""
        for column in self.columns:
            column.copy_(true_flags(column))

    def zero(self, row: int) -> None:
        """Zero one row of all columns."""
        torch._foreach_zero_([column[row % len(column)] for column in self.columns])

    def _conformed(self, leaves: tuple[Any, ...], which: tuple[int, ...] | None) -> tuple[torch.Tensor | None, ...]:
        columns = range(len(self.columns)) if which is None else which
        return tuple(self._conform(i, leaf) for i, leaf in zip(columns, leaves, strict=True))

    def _conform(self, column: int, leaf: Any) -> torch.Tensor | None:
        if leaf is None and self.optional[column]:
            return None
        schema = self.schema
        return conform(dotted(schema.paths[column]), schema.fields[column], leaf, self.lead, self.device)

    def _write_torch(self, row: int, leaves: tuple[torch.Tensor | None, ...], which: tuple[int, ...] | None) -> None:
        rows = self._rows()[row]
        targets = rows if which is None else tuple(rows[i] for i in which)
        given = [(target, leaf) for target, leaf in zip(targets, leaves, strict=True) if leaf is not None]
        missing = [target for target, leaf in zip(targets, leaves, strict=True) if leaf is None]
        if given:
            torch._foreach_copy_([target for target, _ in given], [leaf for _, leaf in given])
        if missing:
            torch._foreach_zero_(missing)

    def _rows(self) -> list[tuple[torch.Tensor, ...]]:
        """Every row as views of the columns, made once: a step is then a single dispatched copy."""
        if self._row_views is None:
            columns = [column if self.lead else column.squeeze(1) for column in self.columns]
            rows = max(map(len, columns))
            views = (column.unbind(0) * (rows // len(column)) for column in columns)
            self._row_views = list(zip(*views, strict=True))
        return self._row_views
