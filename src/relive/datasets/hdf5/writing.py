"""Writing the episodes of a replay buffer as an HDF5 file of robomimic or D4RL."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal

import numpy as np

from relive.datasets.episodes import appearing, require_ordered, written
from relive.datasets.hdf5.d4rl import CUTS
from relive.datasets.hdf5.d4rl import NAMES as D4RL
from relive.datasets.hdf5.file import VECTOR
from relive.datasets.hdf5.robomimic import NAMES as ROBOMIMIC
from relive.datasets.installed import required
from relive.errors import SchemaError, explain
from relive.fields.checks import one_of
from relive.fields.schema import leaves_of
from relive.replay.buffer import ReplayBuffer

_CHUNK_BYTES = 1 << 18
_D4RL_COLUMNS = {field: column for column, field in D4RL.items()} | {"next_obs": "next_observations"}
_ROBOMIMIC_COLUMNS = {field: column for column, field in ROBOMIMIC.items()}


def to_hdf5(
    replay: ReplayBuffer, path: str | PathLike[str], *, layout: Literal["robomimic", "d4rl"] = "robomimic"
) -> None:
    """Write the episodes of a replay buffer as an HDF5 file, which `from_hdf5` reads back bit for bit.

    Extra fields are arrays of their names. The file has every next observation; robomimic's layout also has an array
    "truncated" beside "dones", and an observation without parts is called "obs/obs". The file appears when it is whole.

    Args:
        replay: a replay buffer in time order.
        path: the file, which must not exist.
        layout: "robomimic" has a group per episode; "d4rl" has flat arrays, and one array of observations.
    """
    h5py = required("h5py", "hdf5")
    require_ordered("to_hdf5", replay)
    write = _LAYOUTS[one_of("layout", layout, _LAYOUTS)]
    with appearing("to_hdf5", path) as unfinished, h5py.File(unfinished, "w") as file:
        write(replay, file)


def _robomimic(replay: ReplayBuffer, file: Any) -> None:
    group, total = file.create_group("data"), 0
    for number, episode in enumerate(written(replay)):
        demo = group.create_group(f"demo_{number}")
        for name, tree in episode.items():
            if name in ("obs", "next_obs") and not isinstance(tree, dict):
                tree = {"obs": tree}  # noqa: PLW2901 (robomimic's observations have names)
            for parts, leaf in leaves_of((_ROBOMIMIC_COLUMNS.get(name, name),), tree):
                _create(demo, "/".join(parts), leaf)
        demo.attrs["num_samples"] = len(episode["terminated"])
        total += len(episode["terminated"])
    group.attrs["total"] = total


def _d4rl(replay: ReplayBuffer, file: Any) -> None:
    for episode in written(replay):
        for name in ("obs", "action", "reward"):
            if isinstance(episode[name], dict):
                expected, got = f"one field in {name}", f"the fields {', '.join(episode[name])}"
                raise SchemaError(explain('to_hdf5(layout="d4rl")', expected, got, 'Use layout="robomimic".'))
        cut = np.zeros(len(episode["terminated"]), bool)
        cut[-1] = not (episode["terminated"][-1] or episode["truncated"][-1])
        for name, tree in {**episode, CUTS: cut}.items():
            for parts, leaf in leaves_of((_D4RL_COLUMNS.get(name, name),), tree):
                _append(file, "/".join(parts), leaf)
    if CUTS in file and not file[CUTS][:].any():
        del file[CUTS]


def _create(group: Any, column: str, rows: np.ndarray, **form: Any) -> None:
    dataset = group.create_dataset(column, data=rows, **form)
    if column.split("/", maxsplit=1)[0] == "rewards" and rows.shape[1:] == (1,):
        dataset.attrs[VECTOR] = True


def _append(file: Any, column: str, rows: np.ndarray) -> None:
    if column not in file:
        chunk = max(1, _CHUNK_BYTES // max(1, rows[0].nbytes))
        _create(file, column, rows, maxshape=(None, *rows.shape[1:]), chunks=(chunk, *rows.shape[1:]))
        return
    dataset = file[column]
    start = len(dataset)
    dataset.resize(start + len(rows), 0)
    dataset[start:] = rows


_LAYOUTS = {"robomimic": _robomimic, "d4rl": _d4rl}
