"""HDF5 files of robomimic and D4RL: read block by block into any buffer, and written from a replay buffer."""

from __future__ import annotations

import math
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from relive.datasets.files import (
    compute_decoding_limit,
    convert_errors,
    dataset_error,
    import_extra,
    read_episode_arrays,
    refuse_nested_fields,
    require_time_order,
    write_atomically,
)
from relive.datasets.filling import (
    FLAG_ROWS_PER_READ,
    Columns,
    ColumnSpec,
    Encoders,
    FinalObs,
    RowSource,
    fill_from_rows,
    parse_flags,
)
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.schema.checks import check_choice, check_positive_int
from relive.schema.fields import iter_leaves
from relive.storage import Memory

_D4RL_FIELDS = {
    "observations": "obs", "actions": "action", "rewards": "reward", "terminals": "terminated", "timeouts": "truncated",
}  # fmt: skip
"""The field of each column that D4RL calls differently from its field."""
_ROBOMIMIC_FIELDS = {"actions": "action", "rewards": "reward", "dones": "terminated"}
"""The field of each column that robomimic calls differently from its field."""
_CUTS_COLUMN = "cuts"
"""The array of flags that mark the last step of abandoned episodes; `to_hdf5` adds it to D4RL's arrays if needed."""
_VECTOR_ATTRIBUTE = "relive_vector"
"""The attribute by which `to_hdf5` marks an array [T, 1] whose field has shape (1,)."""

_CACHE_BYTES = 1 << 23
_CHUNK_BYTES = 1 << 18
_MAX_DEPTH = 64
"""Maximum depth of nested groups."""
_GZIP_FILTER, _SHUFFLE_FILTER, _CHECKSUM_FILTER, _LZF_FILTER = 1, 2, 3, 32000
_MAX_EXPANSIONS = {_GZIP_FILTER: 1032, _LZF_FILTER: 90}
"""Maximum ratio of decoded to compressed bytes of each supported compressor."""


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
    """Read an HDF5 file of robomimic or D4RL, block by block, into a buffer; return the buffer.

    robomimic (`data/demo_0/obs/…`, `actions`, `rewards`, `dones`): `dones` are terminated, and a demonstration that
    does not end with one is truncated at its last step. D4RL (`observations`, `actions`, `rewards`, `terminals`,
    `timeouts`): `terminals` are terminated, `timeouts` are truncated. All other columns are extra fields of their name.
    A file without rewards gives 0.

    The next observation is in the file (`next_obs`, `next_observations`), or is the observation of the next row in the
    same episode. In a file without next observations, final observations are unknown: a terminated step stores its own
    observation again, which no target uses, and `final_obs` says what becomes of a truncated step.

    Args:
        path: the file.
        buffer: the buffer to fill: a ReplayBuffer, a RolloutBuffer with num_envs=None or a DistillationBuffer. None
            makes a ReplayBuffer with space for all steps, in which float64 becomes float32.
        columns: the fields of columns that are not the usual ones: `{"states": None}` leaves a column out,
            `{"obs/robot0_eef_pos": "obs.position"}` renames it. The name of a group means all of its columns.
        encode: for each column of texts, a function that turns a text into numbers; each text is encoded once.
        time_limit: the maximum number of steps of an episode, for a D4RL file without `timeouts`.
        final_obs: "drop" leaves out a truncated last step whose next observation is unknown, "repeat" stores its own
            observation as the next one, from which a learner then bootstraps. None is "drop" with a `DataWarning`.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    h5py = import_extra("h5py", "hdf5")
    if time_limit is not None:
        check_positive_int("time_limit", time_limit)
    arrays = require_self_contained_file(Path(path))
    # HDF5 caches decoded chunks per open array, so the memory budget is divided among all arrays.
    with h5py.File(path, "r", rdcc_nbytes=_CACHE_BYTES // max(1, arrays)) as file:
        if "observations" in file:
            source = _make_d4rl_source(file, time_limit)
        elif "data" in file and hasattr(file["data"], "items"):
            source = _make_robomimic_source(file)
        else:
            expected, remedy = "the group 'data' (robomimic) or the array 'observations' (D4RL)", "Pass such a file."
            raise dataset_error(Path(path).name, expected, ", ".join(file) or "an empty file", remedy)
        return fill_from_rows(
            "from_hdf5", source, buffer, columns, encode, final_obs, sampler=sampler, device=device, seed=seed
        )


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
    require_time_order("to_hdf5", replay)
    write = _WRITERS[check_choice("layout", layout, _WRITERS)]
    with write_atomically("to_hdf5", path) as unfinished, h5py.File(unfinished, "w") as file:
        write(replay, file)


class _ArrayGroup(NamedTuple):
    """Arrays of the same length: a demonstration of robomimic, or a whole file of D4RL."""

    group: Any
    arrays: dict[str, Any]
    """All arrays below the group; their path in the group is the name of the column."""
    num_rows: int


class _Hdf5Source(RowSource):
    """The rows of a file, one group of arrays after the other.

    Args:
        groups: groups of arrays with the same columns.
        ends: the last row of each episode, counted over all groups.
        fields: the field of each column that the layout calls differently from its field.
        hidden_columns: columns, or groups of columns, that are not fields.
    """

    def __init__(
        self, groups: list[_ArrayGroup], ends: np.ndarray, fields: Mapping[str, str], hidden_columns: tuple[str, ...]
    ) -> None:
        path = Path(groups[0].group.file.filename)
        self.name, self.nbytes = path.name, path.stat().st_size
        self._groups, self._ends, self._fields, self._hidden_columns = groups, ends, fields, hidden_columns

    def describe_columns(self, user_columns: Columns) -> dict[str, ColumnSpec]:
        first, *other_groups = self._groups
        omitted_columns = {
            column for column, field in user_columns.items() if field is None and not self._is_hidden(column)
        }
        expected_forms = _describe_column_types(first, omitted_columns)
        for other in other_groups:
            forms = _describe_column_types(other, omitted_columns)
            for column in (*expected_forms, *forms):
                if forms.get(column) != expected_forms.get(column):
                    expected = f"{expected_forms.get(column, 'no array')}, as in {first.group.name[1:]}"
                    got = forms.get(column, "no array")
                    raise dataset_error(f"{_locate_item(other.group)}/{column}", expected, got, "Repair the file.")
        return {
            column: self._make_column_spec(column, array)
            for column, array in first.arrays.items()
            if not self._is_hidden(column)
        }

    def _make_column_spec(self, column: str, array: Any) -> ColumnSpec:
        name, *parts = column.split("/")
        # `to_hdf5` calls an observation without named parts "obs/obs", so this column is the whole field "obs".
        path = ("obs",) if column == "obs/obs" else (self._fields.get(name, name), *parts)
        shape = tuple((array.shape or ())[1:])
        has_loose_axis = shape == (1,) and _VECTOR_ATTRIBUTE not in array.attrs
        return ColumnSpec(shape, array.dtype, path, _is_text(array), has_loose_axis)

    def find_next_columns(self, obs_columns: list[str]) -> dict[str, str]:
        group, arrays, _ = self._groups[0]
        next_names = {column: f"next_{column}" for column in obs_columns if f"next_{column}" in arrays}
        missing_columns = [column for column in obs_columns if column not in next_names]
        if next_names and missing_columns:
            got, remedy = f"{', '.join(next_names)} only", f"Leave it out: columns={{{missing_columns[0]!r}: None}}."
            raise dataset_error(_locate_item(group), f"the array 'next_{missing_columns[0]}'", got, remedy)
        return next_names

    def read_rows(self, columns: Sequence[str], max_rows: int) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        offset = 0
        for _, arrays, num_rows in self._groups:
            for start in range(0, num_rows, max_rows):
                stop = min(start + max_rows, num_rows)
                values = {
                    column: _read_rows(f"{self.name}: {column}", arrays[column], start, stop) for column in columns
                }
                yield np.searchsorted(self._ends, np.arange(offset + start, offset + stop)), values
            offset += num_rows

    def _is_hidden(self, column: str) -> bool:
        return column.split("/", maxsplit=1)[0] in self._hidden_columns


def _make_robomimic_source(file: Any) -> _Hdf5Source:
    """Return the source of a file in robomimic's layout: the group "data" has a group per demonstration."""
    data, groups = file["data"], []
    for name in sorted(data, key=lambda name: [int(part) for part in re.findall(r"\d{1,18}", name)] or [0]):
        arrays = _find_arrays(data[name])
        actions = next((array for column, array in arrays.items() if column.split("/")[0] == "actions"), None)
        if actions is None:
            got, remedy = f"a group with {', '.join(arrays) or 'no arrays'}", "Pass a file in robomimic's layout."
            raise dataset_error(_locate_item(data[name]), "the array 'actions'", got, remedy)
        groups.append(_ArrayGroup(data[name], arrays, _count_rows(actions)))
    if not groups:
        raise dataset_error(_locate_item(data), "at least 1 demonstration", 0, "Pass a file with steps.")
    ends = np.cumsum([group.num_rows for group in groups]) - 1
    return _Hdf5Source(groups, ends, _ROBOMIMIC_FIELDS, ("next_obs",))


def _make_d4rl_source(file: Any, time_limit: int | None) -> _Hdf5Source:
    """Return the source of a file in D4RL's layout: arrays of all steps, with flags where episodes end."""
    # The group "metadata" is skipped, because it has the weights of the policy and no steps.
    arrays = {name: array for name, array in _find_arrays(file).items() if name.split("/")[0] != "metadata"}
    name = Path(file.filename).name
    for column in ("observations", "actions", "rewards", "terminals"):
        if column not in arrays:
            remedy = "Pass a file in D4RL's layout, or in robomimic's."
            raise dataset_error(name, f"the array {column!r}", ", ".join(arrays), remedy)
    rows, has_timeouts = _count_rows(arrays["rewards"]), "timeouts" in arrays
    if not rows:
        raise dataset_error(f"{name}: rewards", "at least 1 step", 0, "Pass a file with steps.")
    if not has_timeouts and time_limit is None:
        expected, remedy = "the array 'timeouts'", "Pass time_limit=, the maximum number of steps of an episode."
        raise dataset_error(name, expected, ", ".join(arrays), remedy)
    is_end = np.zeros(rows, bool)
    for column in (column for column in ("terminals", "timeouts", _CUTS_COLUMN) if column in arrays):
        _require_num_rows(arrays[column], rows)
        for start in range(0, rows, FLAG_ROWS_PER_READ):
            stop, where = start + FLAG_ROWS_PER_READ, f"{name}: {column}"
            is_end[start:stop] |= parse_flags(where, _read_rows(where, arrays[column], start, stop))
    is_end[-1] = True
    if not has_timeouts and time_limit is not None:
        starts = np.flatnonzero(np.concatenate([[True], is_end[:-1]]))
        steps = np.arange(rows) - np.repeat(starts, np.diff(starts, append=rows))
        is_end |= steps % time_limit == time_limit - 1
    return _Hdf5Source(
        [_ArrayGroup(file, arrays, rows)], np.flatnonzero(is_end), _D4RL_FIELDS, ("next_observations", _CUTS_COLUMN)
    )


def _find_arrays(group: Any) -> dict[str, Any]:
    """Return all arrays below a group by their path; empty for an object that is no group."""
    arrays: dict[str, Any] = {}
    h5py = import_extra("h5py", "hdf5")
    for name, value in group.items() if isinstance(group, h5py.Group) else ():
        if isinstance(value, h5py.Dataset):
            arrays[name] = value
        else:
            arrays |= {f"{name}/{inner}": array for inner, array in _find_arrays(value).items()}
    return arrays


def _locate_item(item: Any) -> str:
    """Return the file name and the path of a group or array, for error messages."""
    name = Path(item.file.filename).name
    return f"{name}: {item.name[1:]}" if item.name != "/" else name


def _count_rows(array: Any) -> int:
    """Return the length of an array; raise if it has no axis, or if flags for all rows would exceed the budget."""
    if not array.shape:
        raise dataset_error(_locate_item(array), "an axis of steps", f"shape {array.shape}", "Pass a file with steps.")
    nbytes = Path(array.file.filename).stat().st_size
    if array.shape[0] > compute_decoding_limit(nbytes) // 16:
        raise dataset_error(_locate_item(array), f"fewer steps, in a file of {nbytes:,} bytes", array.shape[0])
    return array.shape[0]


def _describe_column_types(group: _ArrayGroup, omitted_columns: set[str]) -> dict[str, str]:
    """Return the dtype and shape of each column as text; raise if the columns differ in length."""
    forms = {}
    for column, array in group.arrays.items():
        if column not in omitted_columns:
            _require_num_rows(array, group.num_rows)
            forms[column] = f"{'texts' if _is_text(array) else array.dtype} of shape {array.shape[1:]}"
    return forms


def _require_num_rows(array: Any, num_rows: int) -> None:
    # h5py returns the shape None for an empty array, which is refused like an array of another length.
    if (array.shape or ())[:1] != (num_rows,):
        remedy = "Leave it out with columns=, or repair the file."
        raise dataset_error(_locate_item(array), f"{num_rows} rows", f"shape {array.shape}", remedy)


def _is_text(array: Any) -> bool:
    dtype = array.dtype
    if dtype.kind not in "OS" or array.ndim != 1:
        return False
    return import_extra("h5py", "hdf5").check_string_dtype(dtype) is not None


def _read_rows(where: str, array: Any, start: int, stop: int) -> np.ndarray | list[str]:
    with convert_errors(where, f"rows {start} to {stop} of the array"):
        if _is_text(array):
            return [str(text) for text in array.asstr("utf-8", "strict")[start:stop]]
        return np.asarray(array[start:stop])


def _write_robomimic(replay: ReplayBuffer, file: Any) -> None:
    group, total = file.create_group("data"), 0
    for number, episode in enumerate(read_episode_arrays(replay)):
        demo = group.create_group(f"demo_{number}")
        for (name, *parts), rows in iter_leaves((), episode):
            # In robomimic every part of an observation needs a name, so an observation without parts is called "obs".
            part_names = parts or (["obs"] if name in ("obs", "next_obs") else [])
            _create_array(demo, "/".join([_ROBOMIMIC_COLUMNS.get(name, name), *part_names]), rows)
        demo.attrs["num_samples"] = len(episode["terminated"])
        total += len(episode["terminated"])
    group.attrs["total"] = total


def _write_d4rl(replay: ReplayBuffer, file: Any) -> None:
    for episode in read_episode_arrays(replay):
        fields = ("obs", "action", "reward")
        refuse_nested_fields('to_hdf5(layout="d4rl")', episode, fields, 'Use layout="robomimic".')
        cut = np.zeros(len(episode["terminated"]), bool)
        cut[-1] = not (episode["terminated"][-1] or episode["truncated"][-1])
        for (name, *parts), rows in iter_leaves((), {**episode, _CUTS_COLUMN: cut}):
            column = "/".join([_D4RL_COLUMNS.get(name, name), *parts])
            if column in file:
                start = len(file[column])
                file[column].resize(start + len(rows), 0)
                file[column][start:] = rows
            else:
                chunk = max(1, _CHUNK_BYTES // max(1, rows[0].nbytes))
                _create_array(file, column, rows, maxshape=(None, *rows.shape[1:]), chunks=(chunk, *rows.shape[1:]))
    if _CUTS_COLUMN in file and not file[_CUTS_COLUMN][:].any():
        del file[_CUTS_COLUMN]


def _create_array(group: Any, column: str, rows: np.ndarray, **options: Any) -> None:
    dataset = group.create_dataset(column, data=rows, **options)
    if column.split("/", maxsplit=1)[0] == "rewards" and rows.shape[1:] == (1,):
        dataset.attrs[_VECTOR_ATTRIBUTE] = True


_WRITERS = {"robomimic": _write_robomimic, "d4rl": _write_d4rl}
_D4RL_COLUMNS = {field: column for column, field in _D4RL_FIELDS.items()} | {"next_obs": "next_observations"}
_ROBOMIMIC_COLUMNS = {field: column for column, field in _ROBOMIMIC_FIELDS.items()}


def require_self_contained_file(path: Path, *, is_read_in_groups: bool = False) -> int:
    """Raise unless a file contains all of its data and can be read in little memory; return the number of arrays.

    HDF5 follows links and external data by itself: an untrusted file could read any file of this machine into a
    buffer, or declare an array of terabytes. Refused are links, external and virtual data, cycles, missing bytes,
    bytes shared by several arrays, and chunks that inflate to more than their size.

    Args:
        path: the file.
        is_read_in_groups: whether all arrays of a group of the root are read at once, and must fit into the budget.
    """
    h5py = import_extra("h5py", "hdf5")
    with convert_errors(str(path), "an HDF5 file that can be read"), h5py.File(path, "r", rdcc_nbytes=0) as file:
        file_bytes, stored_bytes, num_arrays = path.stat().st_size, 0, 0
        group_bytes: Counter[str] = Counter()
        for name, item in _walk_objects(file, path.name):
            where = f"{path.name}: {name}"
            for key in item.attrs if h5py.h5a.get_num_attrs(item.id) else ():
                attribute = item.attrs.get_id(key)
                # Lists of texts are refused: in an untrusted file, all entries could refer to one long text.
                if attribute.dtype.hasobject and math.prod(attribute.shape or ()) > 1:
                    got = f"{attribute.shape} texts"
                    raise dataset_error(f"{where}: attribute {key!r}", "numbers, or one text", got)
            if not isinstance(item, h5py.Dataset):
                continue
            _require_data_in_file(where, item, file_bytes)
            if item.dtype.hasobject:
                _require_small_texts(where, item, file_bytes)
            num_arrays += 1
            group = name.split("/")[1]
            group_bytes[group] += math.prod(item.shape or ()) * item.dtype.itemsize
            if is_read_in_groups and group_bytes[group] > compute_decoding_limit(file_bytes):
                raise dataset_error(where, f"groups of at most {compute_decoding_limit(file_bytes):,} bytes", "more")
            stored_bytes += item.id.get_storage_size()
            if stored_bytes > file_bytes:
                expected = f"bytes of its own, in a file of {file_bytes:,}"
                raise dataset_error(where, expected, f"{stored_bytes:,} in all arrays")
    return num_arrays


def _walk_objects(file: Any, file_name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for every object of a file; raise unless the objects form a tree."""
    h5py = import_extra("h5py", "hdf5")

    def address(item: Any) -> tuple[int, int]:
        info = h5py.h5o.get_info(item.id)
        return info.fileno, info.addr

    groups: list[tuple[str, Any, int]] = [("", file, 0)]
    addresses = {address(file)}
    while groups:
        prefix, group, depth = groups.pop()
        for key in group:
            # h5py returns a name that is not UTF-8 as bytes, and such a name is refused.
            if isinstance(key, bytes):
                raise dataset_error(f"{file_name}: {prefix or '/'}", "names in UTF-8", reprlib.repr(key))
            name = f"{prefix}/{key}"
            where = f"{file_name}: {name}"
            if group.id.links.get_info(key.encode()).type != h5py.h5l.TYPE_HARD:
                link = group.get(key, getlink=True)
                target = f"{getattr(link, 'filename', '')}:{link.path}".removeprefix(":")
                raise dataset_error(where, "an object of this file", f"a link to {target!r}")
            item = group[key]
            if address(item) in addresses or depth == _MAX_DEPTH:
                raise dataset_error(where, "a tree of objects", "an object met twice, or groups nested too deeply")
            addresses.add(address(item))
            yield name, item
            if isinstance(item, h5py.Group):
                groups.append((name, item, depth + 1))


def _require_data_in_file(where: str, array: Any, file_bytes: int) -> None:
    """Raise unless the file has all bytes of an array, in chunks that can be decoded in little memory."""
    if array.is_virtual:
        raise dataset_error(where, "data in this file", "a virtual dataset, which refers to other files")
    if array.external:
        raise dataset_error(where, "data in this file", f"external data in {array.external[0][0]!r}")
    if not array.shape or not math.prod(array.shape):
        return
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    if array.chunks is None:
        is_complete = array.id.get_storage_size() >= nbytes
    else:
        num_chunks = math.prod(-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True))
        is_complete = array.id.get_num_chunks() == num_chunks
        _require_small_chunks(where, array, compute_decoding_limit(file_bytes) // 2)
    if not is_complete:
        raise dataset_error(where, f"{nbytes:,} bytes", f"shape {array.shape} with fewer stored bytes")


def _require_small_chunks(where: str, array: Any, max_bytes: int) -> None:
    """Raise if decoding a chunk may take more than `max_bytes`: HDF5 inflates a chunk before it checks its size."""
    filters = array.id.get_create_plist()
    codes = [filters.get_filter(i)[0] for i in range(filters.get_nfilters())]
    compressors = [code for code in codes if code in _MAX_EXPANSIONS]
    is_known = {*codes} <= {*_MAX_EXPANSIONS, _SHUFFLE_FILTER, _CHECKSUM_FILTER}
    if not is_known or len(compressors) > 1 or len(set(codes)) < len(codes):
        expected = "at most one of the filters gzip and lzf, with shuffle and fletcher32"
        raise dataset_error(where, expected, f"filters {codes}")
    chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
    if chunk_bytes > max_bytes:
        raise dataset_error(where, f"chunks of at most {max_bytes:,} bytes", f"{chunk_bytes:,}")
    if not compressors:
        return
    large_chunks: list[tuple[int, ...]] = []

    def collect_if_large(chunk: Any) -> None:
        if chunk.size * _MAX_EXPANSIONS[compressors[0]] > max_bytes:
            large_chunks.append(chunk.chunk_offset)

    array.id.chunk_iter(collect_if_large)
    for offset in large_chunks:
        _, body = array.id.read_direct_chunk(offset)
        if compressors[0] != _GZIP_FILTER or len(zlib.decompressobj().decompress(body, chunk_bytes + 1)) > chunk_bytes:
            got = "a chunk that may inflate to more"
            raise dataset_error(f"{where}: chunk {offset}", f"at most {chunk_bytes:,} bytes", got)


def _require_small_texts(where: str, array: Any, file_bytes: int) -> None:
    """Raise if the texts or lists of an array are together longer than the file.

    HDF5 stores them apart from the array, and many entries may refer to the same long text.
    """
    h5py = import_extra("h5py", "hdf5")
    if h5py.check_ref_dtype(array.dtype) is not None or not array.shape:
        return
    item = h5py.check_vlen_dtype(array.dtype)
    is_list = item is not None and not np.dtype(item).hasobject
    if h5py.check_string_dtype(array.dtype) is None and not is_list:
        raise dataset_error(where, "numbers, texts or lists of numbers", f"dtype {array.dtype}")
    total_bytes, texts_per_read, texts_per_row = 0, 8 + (8 << 20) // file_bytes, math.prod(array.shape[1:])
    if texts_per_row > texts_per_read:
        raise dataset_error(where, f"at most {texts_per_read} texts per row", array.shape)
    rows_per_read = max(1, texts_per_read // max(1, texts_per_row))
    for start in range(0, array.shape[0], rows_per_read):
        for entry in array[start : start + rows_per_read].ravel():
            total_bytes += getattr(entry, "nbytes", None) or len(entry)
        if total_bytes > file_bytes:
            expected = f"texts of their own, in a file of {file_bytes:,} bytes"
            raise dataset_error(where, expected, f"{total_bytes:,} bytes or more")
