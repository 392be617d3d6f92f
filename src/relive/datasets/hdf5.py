"""HDF5 files of robomimic and D4RL: read block by block into any buffer, and written from a replay buffer."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from relive.datasets.columns import ColumnPlan, Columns, ColumnSpec, Encoders, check_columns, check_encoders
from relive.datasets.filling import (
    FileRows,
    FinalObs,
    episode_arrays,
    fill,
    require_ordered,
    split_episodes,
    write_atomically,
)
from relive.datasets.untrusted import damage, decode_budget, import_extra, wrap_errors
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.schema.checks import one_of, positive
from relive.schema.fields import leaves_of
from relive.storage import Memory

_D4RL = {
    "observations": "obs", "actions": "action", "rewards": "reward", "terminals": "terminated", "timeouts": "truncated",
}  # fmt: skip
_ROBOMIMIC = {"actions": "action", "rewards": "reward", "dones": "terminated"}
"""The fields of columns that have another name in a layout."""
_CUTS = "cuts"
"""Flags of the last steps of abandoned episodes: `to_hdf5` adds this array to D4RL's own if there are any."""
_VECTOR = "relive_vector"
"""The attribute of an array [T, 1] that `to_hdf5` wrote from a field of shape (1,)."""

_CACHE_BYTES = 1 << 23
_CHUNK_BYTES = 1 << 18
_ROWS_OF_FLAGS = 1 << 18
_DEEPEST = 64
"""The most groups inside each other."""
_GZIP, _SHUFFLE, _CHECKSUM, _LZF = 1, 2, 3, 32000
_EXPANSIONS = {_GZIP: 1032, _LZF: 90}
"""The compressors that are read, with the most bytes that one compressed byte can become."""


def from_hdf5(
    path: str | PathLike[str],
    buffer: Any = None,
    *,
    columns: Columns | None = None,
    encode: Encoders | None = None,
    time_limit: int | None = None,
    final_obs: FinalObs = None,
    sampler: Sampler | None = None,
    device: torch.device | str | Memory = "cpu",
    seed: int | None = None,
) -> Any:
    """Read an HDF5 file of robomimic or D4RL, block by block, into a buffer; returns the buffer.

    robomimic (`data/demo_0/obs/…`, `actions`, `rewards`, `dones`): `dones` are terminated, and a demonstration that
    does not end with one is truncated at its last step. D4RL (`observations`, `actions`, `rewards`, `terminals`,
    `timeouts`): `terminals` are terminated, `timeouts` are truncated. All other columns are extra fields of their name.
    A file without rewards gives 0.

    The next observation is the one that the file has (`next_obs`, `next_observations`), and otherwise that of the next
    row in the same episode. Then an episode's final observation is unknown: a terminated step stores its own
    observation again, which no target uses, and `final_obs` says what becomes of a truncated one.

    Args:
        path: the file.
        buffer: the buffer to fill: a ReplayBuffer, a RolloutBuffer with num_envs=None or a DistillationBuffer. None
            makes a ReplayBuffer with space for all steps, in which float64 becomes float32.
        columns: the fields of columns that are not the usual ones: `{"states": None}` leaves a column out,
            `{"obs/robot0_eef_pos": "obs.position"}` renames it. The name of a group means all of its columns.
        encode: for each column of texts, a function that turns a text into numbers; each text is encoded once.
        time_limit: the most steps of an episode, for a D4RL file without `timeouts`.
        final_obs: "drop" leaves out a truncated last step whose next observation is unknown, "repeat" stores its own
            observation as the next one, from which a learner then bootstraps. None is "drop" with a `DataWarning`.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    chosen, encoders = check_columns(columns), check_encoders(encode)
    with _open_file(path) as (file_path, file):
        if "observations" in file:
            limit = None if time_limit is None else positive("time_limit", time_limit)
            source = _D4rlFile(file_path, file, limit)
        elif "data" in file and hasattr(file["data"], "items"):
            source = _RobomimicFile(file_path, file["data"])
        else:
            expected, remedy = "the group 'data' (robomimic) or the array 'observations' (D4RL)", "Pass such a file."
            raise SchemaError(explain(file_path.name, expected, ", ".join(file) or "an empty file", remedy))
        plan = source.plan(chosen, encoders, buffer)
        rows, ends = source.count(plan)
        if buffer is None:
            buffer = plan.make_buffer(rows + ends, sampler, device, seed)
        return fill("from_hdf5", buffer, split_episodes(file_path.name, source.read(plan)), rows, final_obs)


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
    h5py = import_extra("h5py", "hdf5")
    require_ordered("to_hdf5", replay)
    write = _WRITERS[one_of("layout", layout, _WRITERS)]
    with write_atomically("to_hdf5", path) as unfinished, h5py.File(unfinished, "w") as file:
        write(replay, file)


@contextmanager
def _open_file(path: str | PathLike[str]) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the file, after a check that all of its data lie in it."""
    h5py, path = import_extra("h5py", "hdf5"), Path(path)
    arrays = require_self_contained(path)
    # HDF5 caches decoded chunks of every open array, so the size of a cache depends on the number of arrays.
    with h5py.File(path, "r", rdcc_nbytes=_CACHE_BYTES // max(1, arrays)) as file:
        yield path, file


class _D4rlFile:
    """D4RL's layout: flat arrays of all steps, one episode after the other, with flags where episodes end."""

    def __init__(self, path: Path, file: Any, time_limit: int | None) -> None:
        self._path, self._nbytes, self._time_limit = path, path.stat().st_size, time_limit
        # The group "metadata" has the weights of the policy that acted, and no steps.
        self._arrays = {name: array for name, array in _arrays_in(file).items() if name.split("/")[0] != "metadata"}
        for name in ("observations", "actions", "rewards", "terminals"):
            if name not in self._arrays:
                remedy = "Pass a file in D4RL's layout, or in robomimic's."
                raise SchemaError(explain(path.name, f"the array {name!r}", ", ".join(self._arrays), remedy))
        self._rows = _num_rows(f"{path.name}: rewards", self._arrays["rewards"], self._nbytes)
        if not self._rows:
            raise SchemaError(explain(f"{path.name}: rewards", "at least 1 step", 0, "Pass a file with steps."))

    def plan(self, chosen: Columns, encode: Encoders, buffer: Any) -> ColumnPlan:
        """Choose the columns to read."""
        columns = {}
        for name, array in self._arrays.items():
            is_left_out = name in chosen and chosen[name] is None and name not in ("next_observations", _CUTS)
            rows = (len(array) if array.shape else 0) if is_left_out else self._rows
            columns[name] = _column_spec(f"{self._path.name}: {name}", array, rows)
        for name in ("next_observations", _CUTS):
            columns.pop(name, None)
        return ColumnPlan("from_hdf5", self._path.name, self._nbytes, columns, _d4rl_path, chosen, encode, buffer)

    def count(self, plan: ColumnPlan) -> tuple[int, int]:
        """The number of steps, and of steps that end an episode."""
        self._last = self._episode_ends()
        return self._rows, len(self._last)

    def read(self, plan: ColumnPlan) -> Iterator[FileRows]:
        """All steps, after `count`."""
        following = self._arrays.get("next_observations")
        nexts = {} if following is None else {"observations": following}

        def episode(start: int, stop: int) -> np.ndarray:
            return np.searchsorted(self._last, np.arange(start, stop))

        return _read_rows(self._path, plan, self._arrays, nexts, episode, self._rows)

    def _episode_ends(self) -> np.ndarray:
        """The last row of each episode, by the flags or the time limit."""
        flags = self._flags("terminals")
        if "timeouts" in self._arrays:
            flags = flags | self._flags("timeouts")
        elif self._time_limit is None:
            expected, remedy = "the array 'timeouts'", "Pass time_limit=, the most steps of an episode."
            raise SchemaError(explain(self._path.name, expected, ", ".join(self._arrays), remedy))
        if _CUTS in self._arrays:
            flags = flags | self._flags(_CUTS)
        flags[-1] = True
        if self._time_limit is not None and "timeouts" not in self._arrays:
            starts = np.flatnonzero(np.concatenate([[True], flags[:-1]]))
            lengths = np.diff(starts, append=self._rows)
            steps = np.arange(self._rows) - np.repeat(starts, lengths)
            flags |= steps % self._time_limit == self._time_limit - 1
        return np.flatnonzero(flags)

    def _flags(self, name: str) -> np.ndarray:
        where, array = f"{self._path.name}: {name}", self._arrays[name]
        _column_spec(where, array, self._rows)
        flags = np.zeros(self._rows, bool)
        for start in range(0, self._rows, _ROWS_OF_FLAGS):
            stop = min(start + _ROWS_OF_FLAGS, self._rows)
            part = np.asarray(_read(where, array, start, stop)).reshape(stop - start, -1)
            if part.shape[1] != 1 or not np.isin(part, (0, 1)).all():
                remedy = "Repair the file."
                raise SchemaError(explain(where, "a 0 or 1 per step", f"shape {array.shape}, or other numbers", remedy))
            flags[start:stop] = part[:, 0]
        return flags


def _d4rl_path(column: str) -> tuple[str, ...]:
    """The path of the field that a column becomes."""
    first, *rest = column.split("/")
    return (_D4RL.get(first, first), *rest)


class _RobomimicFile:
    """robomimic's layout: the group "data" has a group per demonstration, with "obs", "actions" and more inside."""

    def __init__(self, path: Path, group: Any) -> None:
        self._path, self._nbytes = path, path.stat().st_size
        names = sorted(group, key=lambda name: [int(part) for part in re.findall(r"\d{1,18}", name)] or [0])
        self._demos = {name: self._arrays(group, name) for name in names}
        if not self._demos:
            raise SchemaError(explain(f"{path.name}: data", "at least 1 demonstration", 0, "Pass a file with steps."))
        self._columns = self._column_specs(names[0])
        for name in names[1:]:
            self._require_same(name, names[0])

    def _arrays(self, group: Any, name: str) -> dict[str, Any]:
        arrays = _arrays_in(group[name]) if hasattr(group[name], "items") else {}
        if "actions" not in arrays and not any(column.startswith("actions/") for column in arrays):
            got, remedy = f"a group with {', '.join(arrays) or 'no arrays'}", "Pass a file in robomimic's layout."
            raise SchemaError(explain(f"{self._path.name}: data/{name}", "the array 'actions'", got, remedy))
        return arrays

    def _rows(self, name: str) -> int:
        columns = self._demos[name].items()
        column, array = next((column, array) for column, array in columns if column.split("/")[0] == "actions")
        return _num_rows(f"{self._path.name}: data/{name}/{column}", array, self._nbytes)

    def _column_specs(self, name: str) -> dict[str, ColumnSpec]:
        rows, where = self._rows(name), f"{self._path.name}: data/{name}"
        return {column: _column_spec(f"{where}/{column}", array, rows) for column, array in self._demos[name].items()}

    def _require_same(self, name: str, first: str) -> None:
        mine, theirs = (
            {
                column: f"{'texts' if spec.text is not None else spec.dtype} of shape {spec.shape}"
                for column, spec in demo
            }
            for demo in (self._column_specs(name).items(), self._columns.items())
        )
        for column in (*theirs, *mine):
            if mine.get(column) != theirs.get(column):
                where = f"{self._path.name}: data/{name}/{column}"
                expected = f"{theirs.get(column, 'no array')}, as in data/{first}"
                raise SchemaError(explain(where, expected, mine.get(column, "no array"), "Repair the file."))

    def plan(self, chosen: Columns, encode: Encoders, buffer: Any) -> ColumnPlan:
        """Choose the columns to read."""
        own = {column: spec for column, spec in self._columns.items() if not column.startswith("next_obs/")}
        if not any(column.startswith("obs/") for column in own) and not any(
            (field or "").startswith("obs") for field in chosen.values()
        ):
            remedy = "Extract them with robomimic's dataset_states_to_obs, or pass columns={'states': 'obs'}."
            got = f"the columns {', '.join(own)}"
            raise SchemaError(explain(f"{self._path.name}: data", "observations in 'obs'", got, remedy))
        return ColumnPlan("from_hdf5", self._path.name, self._nbytes, own, _robomimic_path, chosen, encode, buffer)

    def count(self, plan: ColumnPlan) -> tuple[int, int]:
        """The number of steps, and of steps that end an episode."""
        steps, ends = 0, 0
        for name, arrays in self._demos.items():
            where, rows = f"{self._path.name}: data/{name}", self._rows(name)
            flags = [_read(f"{where}/{column}", arrays[column], 0, rows).reshape(rows) != 0 for column in plan.flags]
            steps, ends = steps + rows, ends + 1 + (int(np.any(flags, 0)[:-1].sum()) if flags else 0)
        return steps, ends

    def read(self, plan: ColumnPlan) -> Iterator[FileRows]:
        """All steps, one demonstration after the other."""
        for number, (name, arrays) in enumerate(self._demos.items()):
            nexts = {column: arrays.get(f"next_{column}") for column in plan.columns_of("obs")}
            known = {column: array for column, array in nexts.items() if array is not None}
            if known and len(known) < len(nexts):
                missing = next(column for column in nexts if column not in known)
                where, remedy = f"{self._path.name}: data/{name}", f"Leave it out: columns={{{missing!r}: None}}."
                raise SchemaError(explain(where, f"the array 'next_{missing}'", f"{', '.join(known)} only", remedy))

            def episode(start: int, stop: int, number: int = number) -> np.ndarray:
                return np.full(stop - start, number)

            yield from _read_rows(self._path, plan, arrays, known, episode, self._rows(name))


def _robomimic_path(column: str) -> tuple[str, ...]:
    """The path of the field that a column becomes."""
    first, *rest = column.split("/")
    if column == "obs/obs":  # an observation without parts, as `to_hdf5` writes it
        return ("obs",)
    return (_ROBOMIMIC.get(first, first), *rest)


def _arrays_in(group: Any) -> dict[str, Any]:
    """Every array below a group by its path there."""
    arrays: dict[str, Any] = {}
    h5py = import_extra("h5py", "hdf5")
    for name, value in group.items():
        if isinstance(value, h5py.Group):
            arrays |= {f"{name}/{inner}": array for inner, array in _arrays_in(value).items()}
        elif isinstance(value, h5py.Dataset):
            arrays[name] = value
    return arrays


def _num_rows(where: str, array: Any, file_bytes: int) -> int:
    """The length of an array; raises without an axis of steps, or if flags of all rows would take much memory."""
    if not array.shape:
        raise SchemaError(explain(where, "an axis of steps", f"shape {array.shape}", "Pass a file with steps."))
    if array.shape[0] > decode_budget(file_bytes) // 16:
        raise damage(where, f"fewer steps, in a file of {file_bytes:,} bytes", array.shape[0])
    return array.shape[0]


def _column_spec(where: str, array: Any, rows: int) -> ColumnSpec:
    """Shape and dtype of a row; raises unless the array has `rows` rows."""
    if not array.shape or array.shape[0] != rows:
        remedy = "Leave it out with columns=, or repair the file."
        raise SchemaError(explain(where, f"{rows} rows", f"shape {array.shape}", remedy))
    text = _read(where, array, 0, 1)[0] if _is_text(array) and rows else None
    shape = tuple(array.shape[1:])
    return ColumnSpec(shape, array.dtype, text, has_loose_axis=shape == (1,) and _VECTOR not in array.attrs)


def _is_text(array: Any) -> bool:
    return import_extra("h5py", "hdf5").check_string_dtype(array.dtype) is not None and len(array.shape) == 1


def _read(where: str, array: Any, start: int, stop: int) -> Any:
    """Rows of an array: numbers, or a list of texts."""
    with wrap_errors(where, f"rows {start} to {stop} of the array"):
        if _is_text(array):
            return [str(text) for text in array.asstr("utf-8", "strict")[start:stop]]
        return np.asarray(array[start:stop])


def _read_rows(
    path: Path,
    plan: ColumnPlan,
    arrays: Mapping[str, Any],
    nexts: Mapping[str, Any],
    episode: Callable[[int, int], np.ndarray],
    rows: int,
) -> Iterator[FileRows]:
    """Yield the rows of arrays of the same length, block by block.

    Args:
        path: the file.
        plan: the columns to read.
        arrays: the arrays by column.
        nexts: the arrays of next observations by column of the observation; empty if the file has none.
        episode: a function that gives the episodes of the rows from start to stop.
        rows: the number of rows of each array.
    """
    for start in range(0, rows, plan.rows_per_block):
        stop = min(start + plan.rows_per_block, rows)
        values = {column: _read(f"{path.name}: {column}", arrays[column], start, stop) for column in plan.paths}
        following = {
            column: _read(f"{path.name}: {nexts[column].name}", nexts[column], start, stop)
            for column in (plan.columns_of("obs") if nexts else ())
        }
        yield FileRows(plan.to_fields(values), episode(start, stop), plan.to_fields(following))


def _write_robomimic(replay: ReplayBuffer, file: Any) -> None:
    group, total = file.create_group("data"), 0
    for number, episode in enumerate(episode_arrays(replay)):
        demo = group.create_group(f"demo_{number}")
        for name, tree in episode.items():
            if name in ("obs", "next_obs") and not isinstance(tree, dict):
                tree = {"obs": tree}  # noqa: PLW2901 (robomimic's observations have names)
            for parts, leaf in leaves_of((_ROBOMIMIC_NAMES.get(name, name),), tree):
                _create(demo, "/".join(parts), leaf)
        demo.attrs["num_samples"] = len(episode["terminated"])
        total += len(episode["terminated"])
    group.attrs["total"] = total


def _write_d4rl(replay: ReplayBuffer, file: Any) -> None:
    for episode in episode_arrays(replay):
        for name in ("obs", "action", "reward"):
            if isinstance(episode[name], dict):
                expected, got = f"one field in {name}", f"the fields {', '.join(episode[name])}"
                raise SchemaError(explain('to_hdf5(layout="d4rl")', expected, got, 'Use layout="robomimic".'))
        cut = np.zeros(len(episode["terminated"]), bool)
        cut[-1] = not (episode["terminated"][-1] or episode["truncated"][-1])
        for name, tree in {**episode, _CUTS: cut}.items():
            for parts, leaf in leaves_of((_D4RL_NAMES.get(name, name),), tree):
                _append(file, "/".join(parts), leaf)
    if _CUTS in file and not file[_CUTS][:].any():
        del file[_CUTS]


def _create(group: Any, column: str, rows: np.ndarray, **form: Any) -> None:
    dataset = group.create_dataset(column, data=rows, **form)
    if column.split("/", maxsplit=1)[0] == "rewards" and rows.shape[1:] == (1,):
        dataset.attrs[_VECTOR] = True


def _append(file: Any, column: str, rows: np.ndarray) -> None:
    if column not in file:
        chunk = max(1, _CHUNK_BYTES // max(1, rows[0].nbytes))
        _create(file, column, rows, maxshape=(None, *rows.shape[1:]), chunks=(chunk, *rows.shape[1:]))
        return
    dataset = file[column]
    start = len(dataset)
    dataset.resize(start + len(rows), 0)
    dataset[start:] = rows


_WRITERS = {"robomimic": _write_robomimic, "d4rl": _write_d4rl}
_D4RL_NAMES = {field: column for column, field in _D4RL.items()} | {"next_obs": "next_observations"}
_ROBOMIMIC_NAMES = {field: column for column, field in _ROBOMIMIC.items()}


def require_self_contained(path: Path, *, is_read_in_groups: bool = False) -> int:
    """Raise unless all arrays of a file lie in it, and take little memory; returns the number of arrays.

    HDF5 follows links and external data by itself: an untrusted dataset could read any file of this machine into a
    buffer, or claim an array of terabytes. Therefore links, external and virtual data, cycles, missing bytes, bytes of
    several arrays, and chunks that inflate to more than they should are refused.

    Args:
        path: the file.
        is_read_in_groups: whether all arrays of a group of the root are read at once, and must fit into the budget.
    """
    import h5py  # noqa: PLC0415 (an extra)

    with wrap_errors(str(path), "an HDF5 file that can be read"), h5py.File(path, "r", rdcc_nbytes=0) as file:
        nbytes, stored, arrays = path.stat().st_size, 0, 0
        group_bytes: Counter[str] = Counter()
        for name, item in _objects(h5py, file, path):
            where = f"{path.name}: {name}"
            _require_small_attributes(where, item)
            if isinstance(item, h5py.Dataset):
                _require_bytes(where, item, nbytes)
                if item.dtype.hasobject:
                    _require_small_texts(h5py, where, item, nbytes)
                arrays += 1
                group_bytes[name.split("/")[1]] += math.prod(item.shape or ()) * item.dtype.itemsize
                if is_read_in_groups and group_bytes[name.split("/")[1]] > decode_budget(nbytes):
                    raise damage(where, f"groups of at most {decode_budget(nbytes):,} bytes", "more")
                stored += item.id.get_storage_size()
                if stored > nbytes:
                    raise damage(where, f"bytes of its own, in a file of {nbytes:,}", f"{stored:,} in all arrays")
    return arrays


def _objects(h5py: Any, file: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for every object below the root; raises if the objects do not form a tree."""

    def address(item: Any) -> tuple[int, int]:
        info = h5py.h5o.get_info(item.id)
        return info.fileno, info.addr

    groups: list[tuple[str, Any, int]] = [("", file, 0)]
    seen = {address(file)}
    while groups:
        prefix, group, depth = groups.pop()
        for key in group:
            name = f"{prefix}/{key}"
            where = f"{path.name}: {name}"
            link = group.get(key, getlink=True)
            if not isinstance(link, h5py.HardLink):
                target = f"{getattr(link, 'filename', '')}:{link.path}".removeprefix(":")
                raise damage(where, "an object of this file", f"a link to {target!r}")
            item = group[key]
            if address(item) in seen or depth == _DEEPEST:
                raise damage(where, "a tree of objects", "an object met twice, or groups nested too deeply")
            seen.add(address(item))
            yield name, item
            if isinstance(item, h5py.Group):
                groups.append((name, item, depth + 1))


def _require_bytes(where: str, dataset: Any, file_bytes: int) -> None:
    if dataset.is_virtual:
        raise damage(where, "data of its own", "a virtual dataset, which consists of other files")
    if dataset.external:
        raise damage(where, "data of its own", f"external data in {dataset.external[0][0]!r}")
    if not dataset.shape or not math.prod(dataset.shape):
        return
    nbytes = math.prod(dataset.shape) * dataset.dtype.itemsize
    if dataset.chunks is None:
        is_there = dataset.id.get_storage_size() >= nbytes
    else:
        chunks = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        is_there = dataset.id.get_num_chunks() == chunks
        _require_small_chunks(where, dataset, decode_budget(file_bytes) // 2)
    if not is_there:
        got = f"shape {dataset.shape} with fewer stored bytes"
        raise damage(where, f"{nbytes:,} bytes", got)


def _require_small_chunks(where: str, dataset: Any, most: int) -> None:
    """Raise unless every chunk is decoded within `most` bytes: HDF5 inflates a chunk before it looks at its size."""
    filters = dataset.id.get_create_plist()
    codes = [filters.get_filter(i)[0] for i in range(filters.get_nfilters())]
    compressors = [code for code in codes if code in _EXPANSIONS]
    if len(compressors) > 1 or len(set(codes)) < len(codes) or not {*codes} <= {*_EXPANSIONS, _SHUFFLE, _CHECKSUM}:
        raise damage(where, "at most one of the filters gzip and lzf, with shuffle and fletcher32", f"filters {codes}")
    nbytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    if nbytes > most:
        raise damage(where, f"chunks of at most {most:,} bytes", f"{nbytes:,}")
    if not compressors:
        return
    large: list[tuple[int, ...]] = []
    expansion = _EXPANSIONS[compressors[0]]

    def look(chunk: Any) -> None:
        if chunk.size * expansion > most:
            large.append(chunk.chunk_offset)

    dataset.id.chunk_iter(look)
    for offset in large:
        _, body = dataset.id.read_direct_chunk(offset)
        if compressors[0] != _GZIP or len(zlib.decompressobj().decompress(body, nbytes + 1)) > nbytes:
            raise damage(f"{where}: chunk {offset}", f"at most {nbytes:,} bytes", "a chunk that may inflate to more")


def _require_small_attributes(where: str, item: Any) -> None:
    """Raise if an attribute is a list of texts: each could be the same long one."""
    for name in item.attrs:
        attribute = item.attrs.get_id(name)
        if attribute.dtype.hasobject and math.prod(attribute.shape or ()) > 1:
            raise damage(f"{where}: attribute {name!r}", "numbers, or one text", f"{attribute.shape} texts")


def _require_small_texts(h5py: Any, where: str, dataset: Any, file_bytes: int) -> None:
    """Raise unless the texts or lists of an array together are no longer than the file.

    HDF5 stores them apart from the array, and many entries may refer to the same long text.
    """
    if h5py.check_ref_dtype(dataset.dtype) is not None or not dataset.shape:
        return
    item = h5py.check_vlen_dtype(dataset.dtype)
    is_list = item is not None and not np.dtype(item).hasobject
    if h5py.check_string_dtype(dataset.dtype) is None and not is_list:
        raise damage(where, "numbers, texts or lists of numbers", f"dtype {dataset.dtype}")
    total, at_once = 0, 8 + (8 << 20) // file_bytes
    rows = max(1, at_once // max(1, math.prod(dataset.shape[1:])))
    if math.prod(dataset.shape[1:]) > at_once:
        raise damage(where, f"at most {at_once} texts per row", dataset.shape)
    for start in range(0, dataset.shape[0], rows):
        total += sum(getattr(entry, "nbytes", None) or len(entry) for entry in dataset[start : start + rows].ravel())
        if total > file_bytes:
            raise damage(where, f"texts of their own, in a file of {file_bytes:,} bytes", f"{total:,} bytes or more")
