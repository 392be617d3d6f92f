"""Writing the episodes of a replay buffer as a zarr store in diffusion policy's layout."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from relive.datasets.blocks import sliced
from relive.datasets.episodes import appearing, require_steps, written
from relive.datasets.installed import required
from relive.datasets.zarr.reading import FIELDS
from relive.fields.schema import Path as FieldPath
from relive.fields.schema import leaves_of
from relive.replay.buffer import ReplayBuffer
from relive.storage.codec import to_json

_CHUNK_BYTES = 2_000_000

Write = Callable[[str, bytes], None]


def to_zarr(replay: ReplayBuffer, path: str | PathLike[str]) -> None:
    """Write the episodes of a replay buffer as a zarr store (format 2), which `from_zarr` reads back bit for bit.

    The array `data/x` is the part "x" of the observation, `data/obs` an observation without parts; "action", "reward",
    "terminated", "truncated" and extra fields have arrays of their names. Final observations are in `meta/final_obs`,
    and the attributes of the root say which field each array is. The store appears when it is whole.

    Args:
        replay: a replay buffer in time order, with at least one step.
        path: the folder, or the .zip, which must not exist.
    """
    require_steps("to_zarr", replay)
    with appearing("to_zarr", path) as unfinished, ExitStack() as stack:
        _write_store(replay, _target(unfinished, stack, is_zip=Path(path).suffix == ".zip"))


def _target(path: Path, stack: ExitStack, *, is_zip: bool) -> Write:
    if is_zip:
        return stack.enter_context(zipfile.ZipFile(path, "x")).writestr

    def write(name: str, body: bytes) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(body)

    return write


def _write_store(replay: ReplayBuffer, write: Write) -> None:
    arrays: dict[str, _Appended] = {}
    names: dict[FieldPath, str] = {}
    ends = 0
    for episode in written(replay):
        final = sliced(episode.pop("next_obs"), slice(-1, None))
        leaves = dict(leaf for name, tree in episode.items() for leaf in leaves_of((name,), tree))
        names = names or _names(leaves)
        for parts, leaf in leaves.items():
            _append(arrays, write, f"data/{names[parts]}", leaf)
        for parts, leaf in leaves_of(("obs",), final):
            _append(arrays, write, f"meta/final_obs/{names[parts]}", leaf)
        ends += len(episode["terminated"])
        _append(arrays, write, "meta/episode_ends", np.array([ends]))
    for array in arrays.values():
        array.finish()
    for group in ("", "data/", "meta/", "meta/final_obs/"):
        write(f"{group}.zgroup", to_json({"zarr_format": 2}))
    write(".zattrs", to_json({FIELDS: {name: list(parts) for parts, name in names.items()}}))


def _append(arrays: dict[str, _Appended], write: Write, name: str, rows: np.ndarray) -> None:
    if name not in arrays:
        arrays[name] = _Appended(write, name, rows)
    arrays[name].append(rows)


def _names(leaves: Mapping[FieldPath, Any]) -> dict[FieldPath, str]:
    """The array of each leaf: short where that is enough."""
    short = {parts: "_".join(parts[1:] if parts[0] == "obs" and parts[1:] else parts) for parts in leaves}
    used = Counter(short.values())
    return {parts: name if used[name] == 1 else ".".join(parts) for parts, name in short.items()}


class _Appended:
    """An array that grows along its first axis; whole chunks are written as they fill."""

    def __init__(self, write: Write, name: str, like: np.ndarray) -> None:
        self._write, self._name = write, name
        self._inner, self._dtype = like.shape[1:], like.dtype
        row = max(1, int(np.prod(self._inner)) * self._dtype.itemsize)
        self._chunk = np.zeros((max(1, _CHUNK_BYTES // row), *self._inner), self._dtype)
        self._rows = 0
        self._codec = required("numcodecs", "zarr").Blosc("lz4", clevel=5, shuffle=1)

    def append(self, rows: np.ndarray) -> None:
        length = len(self._chunk)
        while len(rows):
            at = self._rows % length
            part = rows[: length - at]
            self._chunk[at : at + len(part)] = part
            self._rows += len(part)
            rows = rows[len(part) :]
            if self._rows % length == 0:
                self._flush()

    def _flush(self) -> None:
        coordinates = ((self._rows - 1) // len(self._chunk), *(0 for _ in self._inner))
        self._write(f"{self._name}/{'.'.join(map(str, coordinates))}", bytes(self._codec.encode(self._chunk)))
        self._chunk[...] = 0

    def finish(self) -> None:
        if self._rows % len(self._chunk):
            self._flush()
        about = {
            "zarr_format": 2,
            "shape": [self._rows, *self._inner],
            "chunks": list(self._chunk.shape),
            "dtype": self._dtype.str,
            "compressor": self._codec.get_config(),
            "fill_value": None if self._dtype.kind == "c" else 0,
            "order": "C",
            "filters": None,
        }
        self._write(f"{self._name}/.zarray", to_json(about))
