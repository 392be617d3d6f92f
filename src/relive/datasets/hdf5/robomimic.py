"""robomimic's layout: the group "data" has a group per demonstration, with "obs", "actions" and more inside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from relive.datasets.blocks import Stretch
from relive.datasets.columns import Column, Columns, Encoders, Plan
from relive.datasets.hdf5.file import Steps, column_of, datasets_in, read, rows_of, stretches
from relive.errors import SchemaError, explain

NAMES = {"actions": "action", "rewards": "reward", "dones": "terminated"}
"""Fields whose columns have another name."""


def is_robomimic(file: Any) -> bool:
    """Whether a file has this layout."""
    return "data" in file and hasattr(file["data"], "items")


def usual_path(column: str) -> tuple[str, ...]:
    """The path of the field that a column becomes."""
    first, *rest = column.split("/")
    if column == "obs/obs":  # an observation without parts, as `to_hdf5` writes it
        return ("obs",)
    return (NAMES.get(first, first), *rest)


class Demonstrations:
    """The demonstrations of a file, in the order of their numbers."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._nbytes = path, path.stat().st_size
        group = file["data"]
        names = sorted(group, key=lambda name: [int(part) for part in re.findall(r"\d{1,18}", name)] or [0])
        self._found = {name: self._arrays(group, name) for name in names}
        if not self._found:
            raise SchemaError(explain(f"{path.name}: data", "at least 1 demonstration", 0, "Pass a file with steps."))
        self.columns = self._columns(names[0])
        for name in names[1:]:
            self._require_same(name, names[0])

    def _arrays(self, group: Any, name: str) -> dict[str, Any]:
        arrays = datasets_in(group[name]) if hasattr(group[name], "items") else {}
        if "actions" not in arrays and not any(column.startswith("actions/") for column in arrays):
            got, remedy = f"a group with {', '.join(arrays) or 'no arrays'}", "Pass a file in robomimic's layout."
            raise SchemaError(explain(f"{self._path.name}: data/{name}", "the array 'actions'", got, remedy))
        return arrays

    def _rows(self, name: str) -> int:
        columns = self._found[name].items()
        column, array = next((column, array) for column, array in columns if column.split("/")[0] == "actions")
        return rows_of(f"{self._path.name}: data/{name}/{column}", array, self._nbytes)

    def _columns(self, name: str) -> dict[str, Column]:
        rows = self._rows(name)
        return {
            column: column_of(f"{self._path.name}: data/{name}/{column}", array, rows)
            for column, array in self._found[name].items()
        }

    def _require_same(self, name: str, first: str) -> None:
        mine, theirs = (
            {key: _form(about) for key, about in one.items()} for one in (self._columns(name), self.columns)
        )
        for column in (*theirs, *mine):
            if mine.get(column) != theirs.get(column):
                where = f"{self._path.name}: data/{name}/{column}"
                expected = f"{theirs.get(column, 'no array')}, as in data/{first}"
                raise SchemaError(explain(where, expected, mine.get(column, "no array"), "Repair the file."))

    def plan(self, chosen: Columns, encode: Encoders, buffer: Any) -> Plan:
        """Which columns are read."""
        own = {column: about for column, about in self.columns.items() if not column.startswith("next_obs/")}
        if not any(column.startswith("obs/") for column in own) and not any(
            (field or "").startswith("obs") for field in chosen.values()
        ):
            remedy = "Extract them with robomimic's dataset_states_to_obs, or pass columns={'states': 'obs'}."
            got = f"the columns {', '.join(own)}"
            raise SchemaError(explain(f"{self._path.name}: data", "observations in 'obs'", got, remedy))
        return Plan("from_hdf5", self._path.name, self._nbytes, own, usual_path, chosen, encode, buffer)

    def steps(self, plan: Plan) -> Steps:
        """All steps, one demonstration after the other."""
        ends = 0
        for name, arrays in self._found.items():
            where, rows = f"{self._path.name}: data/{name}", self._rows(name)
            found = [read(f"{where}/{column}", arrays[column], 0, rows).reshape(rows) != 0 for column in plan.flags]
            ends += int(np.any(found, 0)[:-1].sum()) + 1 if found else 1
        return Steps(sum(map(self._rows, self._found)), ends, self._stretches(plan))

    def _stretches(self, plan: Plan) -> Iterator[Stretch]:
        for number, (name, arrays) in enumerate(self._found.items()):
            nexts = {column: arrays.get(f"next_{column}") for column in plan.columns_of("obs")}
            known = {column: array for column, array in nexts.items() if array is not None}
            if known and len(known) < len(nexts):
                missing = next(column for column in nexts if column not in known)
                where, remedy = f"{self._path.name}: data/{name}", f"Leave it out: columns={{{missing!r}: None}}."
                raise SchemaError(explain(where, f"the array 'next_{missing}'", f"{', '.join(known)} only", remedy))

            def episode(start: int, stop: int, number: int = number) -> np.ndarray:
                return np.full(stop - start, number)

            yield from stretches(self._path, plan, arrays, known, episode, self._rows(name))


def _form(about: Column) -> str:
    return f"{'texts' if about.text is not None else about.dtype} of shape {about.shape}"
