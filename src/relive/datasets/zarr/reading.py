"""Reading a zarr store in diffusion policy's layout into a buffer."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive.datasets.blocks import STEP, Stretch, split
from relive.datasets.columns import Column, Columns, Plan, chosen_columns
from relive.datasets.filling import FinalObs, fill
from relive.datasets.metadata import MOST_BYTES, parsed, part_of_budget, wrong
from relive.datasets.zarr.arrays import ZarrArray
from relive.datasets.zarr.store import Store, opened
from relive.errors import SchemaError, explain
from relive.fields.schema import Path as FieldPath
from relive.replay.samplers import Sampler
from relive.storage import Memory

_ROWS_OF_FLAGS = 1 << 20
FIELDS = "relive_fields"
"""The attribute of the root that says which field each column is, where `to_zarr` wrote the store."""


def from_zarr(
    path: str | PathLike[str],
    buffer: Any = None,
    *,
    columns: Columns | None = None,
    final_obs: FinalObs = "repeat",
    sampler: Sampler | None = None,
    device: torch.device | str | Memory = "cpu",
    seed: int | None = None,
) -> Any:
    """Read a zarr store in diffusion policy's layout, block by block, into a buffer; returns the buffer.

    The store has an array per column in `data`, with the steps of all episodes, and `meta/episode_ends`. The columns
    "action", "reward", "terminated" and "truncated" are these fields, a column with the name of an extra field of
    `buffer` is that field, and all others are parts of the observation. A store without rewards gives 0; one without
    flags is truncated where an episode ends. The store may be a folder or a .zip, of format 2 or 3.

    The layout has no final observations. A last step stores its own observation as the next one unless `final_obs` says
    otherwise: imitation needs every action, and never looks at the next observation.

    Args:
        path: the folder or .zip.
        buffer: the buffer to fill: a ReplayBuffer, a RolloutBuffer with num_envs=None or a DistillationBuffer. None
            makes a ReplayBuffer with space for all steps, in which float64 becomes float32.
        columns: the fields of columns that are not the usual ones: `{"n_contacts": None}` leaves a column out,
            `{"img": "obs.camera", "stage": "stage"}` renames one and makes the other an extra field.
        final_obs: "repeat" stores a truncated last step with its own observation as the next one, from which a learner
            then bootstraps; "drop" leaves it out. None is "drop" with a `DataWarning`.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    chosen = chosen_columns(columns)
    with opened(Path(path)) as store:
        source = _Source(store)
        plan = Plan("from_zarr", store.name, store.nbytes, source.columns, source.usual_path, chosen, {}, buffer)
        ends = source.ends
        if buffer is None:
            buffer = plan.made(int(ends[-1]) + len(ends) + source.inner_ends(plan), sampler, device, seed)
        blocks = split(store.name, source.stretches(plan), source.finals(plan))
        return fill("from_zarr", buffer, blocks, int(ends[-1]), final_obs)


class _Source:
    """The arrays of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._arrays = {name: ZarrArray(store, f"data/{name}") for name in _arrays_below(store, "data/")}
        ends = ZarrArray(store, "meta/episode_ends") if _has(store, "meta/episode_ends") else None
        if ends is None or not self._arrays:
            expected, remedy = "arrays in 'data', and 'meta/episode_ends'", "Pass a store in diffusion policy's layout."
            found = ", ".join(sorted({name.split("/")[0] for name in store.sizes})) or "an empty folder"
            raise SchemaError(explain(store.name, expected, found, remedy))
        self.ends = _episode_ends(ends, store.nbytes)
        for array in self._arrays.values():
            if array.form.shape[0] != self.ends[-1]:
                raise wrong(array.where, f"{self.ends[-1]} rows, the last of meta/episode_ends", array.form.shape)
        if not any(array.is_complete for array in self._arrays.values()):
            raise wrong(store.name, "an array whose chunks are all stored", "only arrays with missing chunks")
        self.columns = {name: Column(array.form.shape[1:], array.form.dtype) for name, array in self._arrays.items()}
        self._fields = _written_fields(store)

    def usual_path(self, column: str) -> FieldPath:
        """The path of the field that a column becomes."""
        if column in self._fields:
            return self._fields[column]
        return (column,) if column in STEP else ("obs", *column.split("/"))

    def inner_ends(self, plan: Plan) -> int:
        """How many rows end an episode before its last row: a forged or unusual store may have such."""
        rows, found = int(self.ends[-1]) if plan.flags else 0, 0
        for start in range(0, rows, _ROWS_OF_FLAGS):
            stop = min(start + _ROWS_OF_FLAGS, rows)
            is_end = np.any([self._arrays[name].read(start, stop) != 0 for name in plan.flags], 0)
            first, last = np.searchsorted(self.ends, (start, stop), "right")
            is_end[self.ends[first:last] - 1 - start] = False
            found += int(is_end.sum())
        return found

    def stretches(self, plan: Plan) -> Iterator[Stretch]:
        """All rows in order."""
        total = int(self.ends[-1])
        for start in range(0, total, plan.rows_at_once):
            stop = min(start + plan.rows_at_once, total)
            fields = plan.trees({column: self._arrays[column].read(start, stop) for column in plan.paths})
            yield Stretch(fields, np.searchsorted(self.ends, np.arange(start, stop), "right"))

    def finals(self, plan: Plan) -> Callable[[int], Any] | None:
        """The final observation of an episode by its number, where `to_zarr` wrote the store."""
        names = plan.columns_of("obs")
        if not all(_has(self._store, f"meta/final_obs/{name}") for name in names):
            return None
        arrays = {name: ZarrArray(self._store, f"meta/final_obs/{name}") for name in names}
        for name, array in arrays.items():
            form, expected = array.form, (len(self.ends), *self._arrays[name].form.shape[1:])
            if form.shape != expected or form.dtype != self._arrays[name].form.dtype:
                raise wrong(array.where, f"shape {expected}, and the dtype of data/{name}", f"shape {form.shape}")
        return lambda number: plan.trees({name: array.read(number, number + 1) for name, array in arrays.items()})[
            "obs"
        ]


def _arrays_below(store: Store, prefix: str) -> list[str]:
    found = set()
    for name in store.sizes:
        if name.startswith(prefix) and name.endswith("/.zarray"):
            found.add(name[len(prefix) : -len("/.zarray")])
        elif name.startswith(prefix) and name.endswith("/zarr.json"):
            about = parsed(f"{store.name}: {name}", store.read(name, MOST_BYTES))
            if about.get("node_type") == "array":
                found.add(name[len(prefix) : -len("/zarr.json")])
    return sorted(found)


def _has(store: Store, name: str) -> bool:
    return f"{name}/.zarray" in store.sizes or f"{name}/zarr.json" in store.sizes


def _episode_ends(array: ZarrArray, nbytes: int) -> np.ndarray:
    form, most = array.form, part_of_budget(nbytes)
    if len(form.shape) != 1 or form.dtype.kind not in "iu" or not form.shape[0] or 32 * form.shape[0] > most:
        raise wrong(array.where, "a list of whole numbers", f"{form.dtype} of shape {form.shape}")
    ends = array.read(0, form.shape[0]).astype(np.int64)
    if ends[0] < 1 or (np.diff(ends) < 1).any():
        raise wrong(array.where, "numbers that grow, from 1 on", reprlib.repr(ends.tolist()))
    return ends


def _written_fields(store: Store) -> Mapping[str, FieldPath]:
    if ".zattrs" not in store.sizes:
        return {}
    where = f"{store.name}: .zattrs"
    fields = parsed(where, store.read(".zattrs", MOST_BYTES)).get(FIELDS, {})
    if not isinstance(fields, dict):
        raise wrong(where, f"an object in {FIELDS!r}", reprlib.repr(fields))
    for path in fields.values():
        if not isinstance(path, list) or not path or not all(isinstance(part, str) for part in path):
            raise wrong(where, "lists of names", reprlib.repr(path))
    return {column: tuple(path) for column, path in fields.items()}
