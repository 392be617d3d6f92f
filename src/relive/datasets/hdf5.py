"""HDF5 files of robomimic and D4RL: read block by block into any buffer, and written from a replay buffer."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from relive.datasets.columns import Column, Columns, Encoders, Plan, chosen_columns, chosen_encoders
from relive.datasets.filling import FinalObs, Stretch, appearing, fill, require_ordered, split, written
from relive.datasets.untrusted import damage_named, part_of_budget, required, wrong
from relive.errors import SchemaError, explain
from relive.fields.checks import one_of, positive
from relive.fields.schema import leaves_of
from relive.memory import Memory
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler

_DEEPEST = 64
"""The most groups inside each other."""
_GZIP, _SHUFFLE, _CHECKSUM, _LZF = 1, 2, 3, 32000
_EXPANSIONS = {_GZIP: 1032, _LZF: 90}
"""The compressors that are read, with the most bytes that one compressed byte can become."""


def require_own_bytes(path: Path, *, is_read_in_groups: bool = False) -> int:
    """Raise unless all arrays of a file lie in it, and take little memory; returns how many arrays there are.

    HDF5 follows links and external data by itself: an untrusted dataset could read any file of this machine into a
    buffer, or claim an array of terabytes. So links, external and virtual data, cycles, missing bytes, bytes of several
    arrays, and chunks that inflate to more than they should are refused.

    Args:
        path: the file.
        is_read_in_groups: whether all arrays of a group of the root are read at once, and must fit into the budget.
    """
    import h5py  # noqa: PLC0415 (an extra)

    with damage_named(str(path), "an HDF5 file that can be read"), h5py.File(path, "r", rdcc_nbytes=0) as file:
        nbytes, stored, arrays, met = path.stat().st_size, 0, 0, set[Any]()
        group_bytes: Counter[str] = Counter()
        for name, found in _objects(h5py, file, path, met):
            where = f"{path.name}: {name}"
            _require_small_attributes(h5py, where, found)
            if isinstance(found, h5py.Dataset):
                _require_bytes(where, found, nbytes)
                if found.dtype.hasobject:
                    _require_own_texts(h5py, where, found, nbytes)
                arrays += 1
                group_bytes[name.split("/")[1]] += math.prod(found.shape or ()) * found.dtype.itemsize
                if is_read_in_groups and group_bytes[name.split("/")[1]] > part_of_budget(nbytes):
                    raise wrong(where, f"groups of at most {part_of_budget(nbytes):,} bytes", "more")
                stored += found.id.get_storage_size()
                if stored > nbytes:
                    raise wrong(where, f"bytes of its own, in a file of {nbytes:,}", f"{stored:,} in all arrays")
    return arrays


def _objects(h5py: Any, file: Any, path: Path, met: set[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for every object below the root; raises if the objects do not form a tree."""
    groups: list[tuple[str, Any, int]] = [("", file, 0)]
    met.add(_address(h5py, file))
    while groups:
        prefix, group, depth = groups.pop()
        for key in group:
            name = f"{prefix}/{key}"
            where = f"{path.name}: {name}"
            link = group.get(key, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise wrong(where, "an object of this file", f"a link to {_target(link)}")
            found = group[key]
            address = _address(h5py, found)
            if address in met or depth == _DEEPEST:
                raise wrong(where, "a tree of objects", "an object met twice, or groups nested too deeply")
            met.add(address)
            yield name, found
            if isinstance(found, h5py.Group):
                groups.append((name, found, depth + 1))


def _address(h5py: Any, found: Any) -> Any:
    info = h5py.h5o.get_info(found.id)
    return info.fileno, info.addr


def _target(link: Any) -> str:
    return repr(f"{getattr(link, 'filename', '')}:{link.path}".removeprefix(":"))


def _require_bytes(where: str, dataset: Any, file_bytes: int) -> None:
    if dataset.is_virtual:
        raise wrong(where, "data of its own", "a virtual dataset, which consists of other files")
    if dataset.external:
        raise wrong(where, "data of its own", f"external data in {dataset.external[0][0]!r}")
    if not dataset.shape or not math.prod(dataset.shape):
        return
    nbytes = math.prod(dataset.shape) * dataset.dtype.itemsize
    if dataset.chunks is None:
        is_there = dataset.id.get_storage_size() >= nbytes
    else:
        chunks = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        is_there = dataset.id.get_num_chunks() == chunks
        _require_small_chunks(where, dataset, part_of_budget(file_bytes) // 2)
    if not is_there:
        got = f"shape {dataset.shape} with fewer stored bytes"
        raise wrong(where, f"{nbytes:,} bytes", got)


def _require_small_chunks(where: str, dataset: Any, most: int) -> None:
    """Raise unless every chunk is decoded within `most` bytes: HDF5 inflates a chunk before it looks at its size."""
    filters = dataset.id.get_create_plist()
    codes = [filters.get_filter(i)[0] for i in range(filters.get_nfilters())]
    compressors = [code for code in codes if code in _EXPANSIONS]
    if len(compressors) > 1 or len(set(codes)) < len(codes) or not {*codes} <= {*_EXPANSIONS, _SHUFFLE, _CHECKSUM}:
        raise wrong(where, "at most one of the filters gzip and lzf, with shuffle and fletcher32", f"filters {codes}")
    nbytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    if nbytes > most:
        raise wrong(where, f"chunks of at most {most:,} bytes", f"{nbytes:,}")
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
            raise wrong(f"{where}: chunk {offset}", f"at most {nbytes:,} bytes", "a chunk that may inflate to more")


def _require_small_attributes(h5py: Any, where: str, found: Any) -> None:
    """Raise if an attribute is a list of texts: each could be the same long one."""
    for name in found.attrs:
        about = found.attrs.get_id(name)
        if about.dtype.hasobject and math.prod(about.shape or ()) > 1:
            raise wrong(f"{where}: attribute {name!r}", "numbers, or one text", f"{about.shape} texts")


def _require_own_texts(h5py: Any, where: str, dataset: Any, file_bytes: int) -> None:
    """Raise unless the texts or lists of an array together are no longer than the file.

    HDF5 keeps them apart from the array, and many of its entries may mean the same long text.
    """
    if h5py.check_ref_dtype(dataset.dtype) is not None or not dataset.shape:
        return
    if h5py.check_string_dtype(dataset.dtype) is None and not _is_flat(h5py.check_vlen_dtype(dataset.dtype)):
        raise wrong(where, "numbers, texts or lists of numbers", f"dtype {dataset.dtype}")
    total, at_once = 0, 8 + (8 << 20) // file_bytes
    rows = max(1, at_once // max(1, math.prod(dataset.shape[1:])))
    if math.prod(dataset.shape[1:]) > at_once:
        raise wrong(where, f"at most {at_once} texts per row", dataset.shape)
    for start in range(0, dataset.shape[0], rows):
        total += sum(getattr(entry, "nbytes", None) or len(entry) for entry in dataset[start : start + rows].ravel())
        if total > file_bytes:
            raise wrong(where, f"texts of their own, in a file of {file_bytes:,} bytes", f"{total:,} bytes or more")


def _is_flat(dtype: Any) -> bool:
    return dtype is not None and not np.dtype(dtype).hasobject


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


D4RL = {
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


def _d4rl_path(column: str) -> tuple[str, ...]:
    """The path of the field that a column becomes."""
    first, *rest = column.split("/")
    return (D4RL.get(first, first), *rest)


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
        return Plan("from_hdf5", self._path.name, self._nbytes, columns, _d4rl_path, chosen, encode, buffer)

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


ROBOMIMIC = {"actions": "action", "rewards": "reward", "dones": "terminated"}
"""Fields whose columns have another name."""


def is_robomimic(file: Any) -> bool:
    """Whether a file has this layout."""
    return "data" in file and hasattr(file["data"], "items")


def _robomimic_path(column: str) -> tuple[str, ...]:
    """The path of the field that a column becomes."""
    first, *rest = column.split("/")
    if column == "obs/obs":  # an observation without parts, as `to_hdf5` writes it
        return ("obs",)
    return (ROBOMIMIC.get(first, first), *rest)


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
        return Plan("from_hdf5", self._path.name, self._nbytes, own, _robomimic_path, chosen, encode, buffer)

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
    chosen, encoders = chosen_columns(columns), chosen_encoders(encode)
    with opened(path) as (file_path, file):
        if is_d4rl(file):
            flat = FlatSteps(file_path, file)
            plan = flat.plan(chosen, encoders, buffer)
            steps = flat.steps(plan, None if time_limit is None else positive("time_limit", time_limit))
        elif is_robomimic(file):
            demonstrations = Demonstrations(file_path, file)
            plan = demonstrations.plan(chosen, encoders, buffer)
            steps = demonstrations.steps(plan)
        else:
            expected, remedy = "the group 'data' (robomimic) or the array 'observations' (D4RL)", "Pass such a file."
            raise SchemaError(explain(file_path.name, expected, ", ".join(file) or "an empty file", remedy))
        if buffer is None:
            buffer = plan.made(steps.rows + steps.ends, sampler, device, seed)
        return fill("from_hdf5", buffer, split(file_path.name, steps.stretches), steps.rows, final_obs)


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
