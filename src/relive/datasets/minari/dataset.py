"""A Minari dataset, opened safely and read episode by episode."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relive.datasets.hdf5.own_bytes import require_own_bytes
from relive.datasets.installed import required
from relive.datasets.metadata import damage_named, parsed, wrong
from relive.errors import SchemaError, explain
from relive.fields.conversion import path_name
from relive.fields.schema import leaves_of

_MOST_METADATA = 1 << 24
"""The longest metadata.json: the limits of every pixel of an image are in it."""
_MOST_NUMBERS = 1 << 22


class Episode(NamedTuple):
    """One episode of a dataset: T steps and T + 1 observations."""

    number: int
    obs: Any
    action: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: dict[str, Any]
    """Nested arrays [T, …] of each step's info."""

    @property
    def size(self) -> int:
        """The number of steps."""
        return len(self.reward)


def opened(dataset: Any) -> Any:
    """The MinariDataset of an object, a path or an id, after checks of its files."""
    minari = import_minari()
    if isinstance(dataset, minari.MinariDataset):
        _require_own_bytes(Path(dataset.storage.data_path))
        return dataset
    if not isinstance(dataset, str | PathLike):
        remedy = "Pass a MinariDataset, its id or its path."
        raise SchemaError(explain("dataset", "a Minari dataset", type(dataset).__name__, remedy))
    folder = dataset_folder(Path(dataset)) or dataset_folder(dataset_path(str(dataset)))
    if folder is None:
        return minari.load_dataset(str(dataset))  # raises an error that names the missing dataset
    _require_spaces(folder)
    _require_own_bytes(folder)
    with damage_named(str(folder), "a Minari dataset that can be read"):
        return minari.MinariDataset(folder)


def dataset_path(dataset_id: str) -> Path:
    """The folder of a local dataset."""
    from minari.storage import get_dataset_path  # noqa: PLC0415 (an extra)

    return Path(get_dataset_path(dataset_id))


def stored_bytes(dataset: Any) -> int:
    """How many bytes a dataset has on the disk."""
    return sum(path.stat().st_size for path in Path(dataset.storage.data_path).rglob("*") if path.is_file())


def _require_spaces(folder: Path) -> None:
    """Raise if a space is missing or huge.

    Without one Minari would make the dataset's environment, which can run any code.
    """
    where, metadata = f"{folder.name}/metadata.json", _metadata(folder)
    for name in ("observation_space", "action_space"):
        if isinstance(metadata.get(name), str):
            with damage_named(f"{where}: {name}", "a space"):
                _require_small_space(f"{where}: {name}", json.loads(metadata[name]))
    missing = [name for name in ("observation_space", "action_space") if not isinstance(metadata.get(name), str)]
    if missing:
        remedy = "Its environment would be made: if you trust it, pass minari.MinariDataset(path) instead of the path."
        raise SchemaError(explain(where, f"the key {missing[0]!r}", "no such key", remedy))


def _require_small_space(where: str, space: Any) -> None:
    """Raise if a space has a shape that Minari would fill with limits, from few bytes."""
    if isinstance(space, Mapping):
        for name in ("shape", "n"):
            axes = space.get(name)
            if isinstance(axes, list) and math.prod(axes) > _MOST_NUMBERS:
                raise wrong(f"{where}: {name}", f"at most {_MOST_NUMBERS:,} numbers", reprlib.repr(axes))
        if space.get("type") == "MultiBinary" and isinstance(space.get("n"), int) and space["n"] > _MOST_NUMBERS:
            raise wrong(f"{where}: n", f"at most {_MOST_NUMBERS:,} numbers", space["n"])
        space = space.get("subspaces", ())
        space = list(space.values()) if isinstance(space, Mapping) else space
        if isinstance(space, list):
            for part in space:
                _require_small_space(where, part)


def _metadata(folder: Path) -> dict[str, Any]:
    with (folder / "metadata.json").open("rb") as file:
        return parsed(f"{folder.name}/metadata.json", file.read(_MOST_METADATA + 1), _MOST_METADATA)


def _require_own_bytes(folder: Path) -> None:
    file = folder / "main_data.hdf5"
    if file.exists():
        require_own_bytes(file, is_read_in_groups=True)


def dataset_folder(path: Path) -> Path | None:
    """The folder of a Minari dataset's files: `path` or "data" in it; None if neither holds a dataset."""
    for folder in (path, path / "data"):
        try:
            found = _metadata(folder)
        except (OSError, SchemaError):
            continue
        if "data_format" in found:
            return folder
    return None


def import_minari() -> Any:
    """The module `minari`."""
    return required("minari", "minari", "Minari")


def episodes_of(
    dataset: Any, infos: Iterable[str] | None = None, which: Iterable[int] | None = None
) -> Iterator[Episode]:
    """Yield the episodes of a dataset that have steps, in its order."""
    names = None if infos is None else list(infos)
    with damage_named(str(dataset.storage.data_path), "episodes that can be read"):
        for data in dataset.iterate_episodes(which):
            if len(data.rewards):
                yield _episode(data, names)


def _episode(data: Any, names: list[str] | None) -> Episode:
    number, steps = int(data.id), len(data.rewards)
    where = f"episode {number}"
    for path, leaf in leaves_of(("observations",), _mapped(data.observations)):
        if len(leaf) != steps + 1:
            raise SchemaError(
                explain(f"{where}: {path_name(path)}", f"{steps + 1} observations", len(leaf), "Repair the dataset.")
            )
    given = data.infos or {}
    info = {name: _info(f"{where}: infos", given, name, steps) for name in (given if names is None else names)}
    terminated, truncated = (np.asarray(flag).astype(bool) for flag in (data.terminations, data.truncations))
    obs, action = _mapped(data.observations), _mapped(data.actions)
    return Episode(number, obs, action, np.asarray(data.rewards), terminated, truncated, info)


def _mapped(tree: Any) -> Any:
    """Nested tuples as dicts with keys "0", "1", …, as buffers store them; leaves as arrays."""
    if isinstance(tree, tuple):
        return {str(i): _mapped(part) for i, part in enumerate(tree)}
    if isinstance(tree, Mapping):
        return {str(name): _mapped(part) for name, part in tree.items()}
    return np.asarray(tree)


def _info(where: str, given: Mapping[str, Any], name: str, steps: int) -> Any:
    if name not in given:
        got = f"an episode with {', '.join(map(str, given)) or 'no infos'}"
        raise SchemaError(explain(where, f"{name!r} in every episode", got, "Leave it out of infos=."))
    return _per_step(f"{where}: {name}", _mapped(given[name]), steps)


def _per_step(where: str, tree: Any, steps: int) -> Any:
    if isinstance(tree, dict):
        return {name: _per_step(f"{where}.{name}", part, steps) for name, part in tree.items()}
    if tree.dtype.kind not in "biufc" or not tree.ndim or len(tree) not in (steps, steps + 1):
        got = f"dtype {tree.dtype} of shape {tree.shape}"
        remedy = "Pass infos= with the names to keep, or infos=() to read without infos."
        raise SchemaError(explain(where, f"numbers, an entry for each of {steps} steps", got, remedy))
    return tree[1:] if len(tree) == steps + 1 else tree  # the first entry belongs to the reset
