"""D4RL's layout: flat arrays of all steps, one episode after the other, with flags where episodes end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from relive.datasets.columns import Columns, Encoders, Plan
from relive.datasets.hdf5.file import Steps, column_of, datasets_in, read, rows_of, stretches
from relive.errors import SchemaError, explain

NAMES = {
    "observations": "obs", "actions": "action", "rewards": "reward", "terminals": "terminated", "timeouts": "truncated",
}  # fmt: skip
"""The field of each column."""
CUTS = "cuts"
"""Where an episode breaks off without an end: `to_hdf5` writes this array beside D4RL's own, if there are such."""
_ROWS_OF_FLAGS = 1 << 18
_BESIDE = ("next_observations", CUTS)


def is_d4rl(file: Any) -> bool:
    """Whether a file has this layout."""
    return "observations" in file


def usual_path(column: str) -> tuple[str, ...]:
    """The path of the field that a column becomes."""
    first, *rest = column.split("/")
    return (NAMES.get(first, first), *rest)


class FlatSteps:
    """The arrays of a file, which all have one row per step."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        # The group "metadata" has the weights of the policy that acted, and no steps.
        self._arrays = {name: array for name, array in datasets_in(file).items() if name.split("/")[0] != "metadata"}
        for name in ("observations", "actions", "rewards", "terminals"):
            if name not in self._arrays:
                remedy = "Pass a file in D4RL's layout, or in robomimic's."
                raise SchemaError(explain(path.name, f"the array {name!r}", ", ".join(self._arrays), remedy))
        self._nbytes = path.stat().st_size
        self._rows = rows_of(f"{path.name}: rewards", self._arrays["rewards"], self._nbytes)
        if not self._rows:
            raise SchemaError(explain(f"{path.name}: rewards", "at least 1 step", 0, "Pass a file with steps."))

    def plan(self, chosen: Columns, encode: Encoders, buffer: Any) -> Plan:
        """Which columns are read."""
        columns = {}
        for name, array in self._arrays.items():
            if name in _BESIDE:
                column_of(f"{self._path.name}: {name}", array, self._rows)
            else:
                is_left_out = name in chosen and chosen[name] is None
                rows = (len(array) if array.shape else 0) if is_left_out else self._rows
                columns[name] = column_of(f"{self._path.name}: {name}", array, rows)
        return Plan("from_hdf5", self._path.name, self._nbytes, columns, usual_path, chosen, encode, buffer)

    def steps(self, plan: Plan, time_limit: int | None) -> Steps:
        """All steps, with the ends that the flags or the time limit say."""
        last = self._ends(time_limit)
        nexts = {}
        if "next_observations" in self._arrays:
            nexts = {"observations": self._arrays["next_observations"]}

        def episode(start: int, stop: int) -> np.ndarray:
            return np.searchsorted(last, np.arange(start, stop))

        found = stretches(self._path, plan, self._arrays, nexts, episode, self._rows)
        return Steps(self._rows, len(last), found)

    def _ends(self, time_limit: int | None) -> np.ndarray:
        """The last row of each episode."""
        flags = self._flags("terminals")
        if "timeouts" in self._arrays:
            flags = flags | self._flags("timeouts")
        elif time_limit is None:
            expected, remedy = "the array 'timeouts'", "Pass time_limit=, the most steps of an episode."
            raise SchemaError(explain(self._path.name, expected, ", ".join(self._arrays), remedy))
        if CUTS in self._arrays:
            flags = flags | self._flags(CUTS)
        flags[-1] = True
        if time_limit is not None and "timeouts" not in self._arrays:
            starts = np.flatnonzero(np.concatenate([[True], flags[:-1]]))
            lengths = np.diff(starts, append=self._rows)
            flags |= (np.arange(self._rows) - np.repeat(starts, lengths)) % time_limit == time_limit - 1
        return np.flatnonzero(flags)

    def _flags(self, name: str) -> np.ndarray:
        where, array = f"{self._path.name}: {name}", self._arrays[name]
        column_of(where, array, self._rows)
        flags = np.zeros(self._rows, bool)
        for start in range(0, self._rows, _ROWS_OF_FLAGS):
            stop = min(start + _ROWS_OF_FLAGS, self._rows)
            part = np.asarray(read(where, array, start, stop)).reshape(stop - start, -1)
            if part.shape[1] != 1 or not np.isin(part, (0, 1)).all():
                remedy = "Repair the file."
                raise SchemaError(explain(where, "a 0 or 1 per step", f"shape {array.shape}, or other numbers", remedy))
            flags[start:stop] = part[:, 0]
        return flags
