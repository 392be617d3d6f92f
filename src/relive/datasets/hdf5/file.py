"""An HDF5 file of steps, opened safely: its arrays as columns, and rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relive.datasets.blocks import Stretch
from relive.datasets.columns import Column, Plan
from relive.datasets.hdf5.own_bytes import require_own_bytes
from relive.datasets.installed import required
from relive.datasets.metadata import damage_named, part_of_budget, wrong
from relive.errors import SchemaError, explain

_CACHE_BYTES = 1 << 23
VECTOR = "relive_vector"
"""The attribute of an array [T, 1] that `to_hdf5` wrote from a field of shape (1,)."""


class Steps(NamedTuple):
    """The steps of a file, before anything but their flags is read."""

    rows: int
    ends: int
    """How many rows end an episode: each takes one more row in a buffer."""
    stretches: Iterator[Stretch]


@contextmanager
def opened(path: str | PathLike[str]) -> Iterator[tuple[Path, Any]]:
    """The path and the file, after a check that all of its data lie in it."""
    h5py, path = required("h5py", "hdf5"), Path(path)
    arrays = require_own_bytes(path)
    # HDF5 keeps decoded chunks of every array that is open: of few arrays much, of many nearly nothing.
    with h5py.File(path, "r", rdcc_nbytes=_CACHE_BYTES // max(1, arrays)) as file:
        yield path, file


def datasets_in(group: Any) -> dict[str, Any]:
    """Every array below a group by its path there."""
    found: dict[str, Any] = {}
    h5py = required("h5py", "hdf5")
    for name, value in group.items():
        if isinstance(value, h5py.Group):
            found |= {f"{name}/{inner}": dataset for inner, dataset in datasets_in(value).items()}
        elif isinstance(value, h5py.Dataset):
            found[name] = value
    return found


def rows_of(where: str, dataset: Any, file_bytes: int) -> int:
    """How many rows an array has; raises without an axis of steps, and if flags for all rows would take much memory."""
    if not dataset.shape:
        raise SchemaError(explain(where, "an axis of steps", f"shape {dataset.shape}", "Pass a file with steps."))
    if dataset.shape[0] > part_of_budget(file_bytes) // 16:
        raise wrong(where, f"fewer steps, in a file of {file_bytes:,} bytes", dataset.shape[0])
    return dataset.shape[0]


def column_of(where: str, dataset: Any, rows: int) -> Column:
    """What a row of an array has; raises if the array has not `rows` rows."""
    if not dataset.shape or dataset.shape[0] != rows:
        remedy = "Leave it out with columns=, or repair the file."
        raise SchemaError(explain(where, f"{rows} rows", f"shape {dataset.shape}", remedy))
    text = read(where, dataset, 0, 1)[0] if _is_text(dataset) and rows else None
    shape = tuple(dataset.shape[1:])
    return Column(shape, dataset.dtype, text, has_loose_axis=shape == (1,) and VECTOR not in dataset.attrs)


def _is_text(dataset: Any) -> bool:
    return required("h5py", "hdf5").check_string_dtype(dataset.dtype) is not None and len(dataset.shape) == 1


def read(where: str, dataset: Any, start: int, stop: int) -> Any:
    """Rows of an array: numbers, or a list of texts."""
    with damage_named(where, f"rows {start} to {stop} of the array"):
        if _is_text(dataset):
            return [str(text) for text in dataset.asstr("utf-8", "strict")[start:stop]]
        return np.asarray(dataset[start:stop])


def stretches(
    path: Path, plan: Plan, arrays: Mapping[str, Any], nexts: Mapping[str, Any], episode: Any, rows: int
) -> Iterator[Stretch]:
    """The rows of arrays of the same length.

    Args:
        path: the file.
        plan: which arrays are read.
        arrays: the arrays by column.
        nexts: the next observations by column of the observation; empty if the file has none.
        episode: a function that gives the episodes of the rows from start to stop.
        rows: how many rows the arrays have.
    """
    for start in range(0, rows, plan.rows_at_once):
        stop = min(start + plan.rows_at_once, rows)
        found = {column: read(f"{path.name}: {column}", arrays[column], start, stop) for column in plan.paths}
        fields = plan.trees(found)
        next_obs = None
        if nexts:
            led = {
                column: read(f"{path.name}: {nexts[column].name}", nexts[column], start, stop)
                for column in plan.columns_of("obs")
            }
            next_obs = plan.trees(led)["obs"]
        yield Stretch(fields, episode(start, stop), next_obs)
