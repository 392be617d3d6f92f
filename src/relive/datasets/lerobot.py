"""LeRobot datasets (v3): read block by block into any buffer, and written from a replay buffer."""

from __future__ import annotations

import io
import json
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np
import torch

from relive.datasets.files import (
    MAX_JSON_BYTES,
    compute_decoding_limit,
    compute_memory_limit,
    convert_errors,
    dataset_error,
    import_extra,
    parse_json,
    parse_sizes,
    read_episode_arrays,
    require_time_order,
    write_atomically,
)
from relive.datasets.filling import (
    Columns,
    ColumnSpec,
    Encoders,
    FinalObs,
    RowSource,
    fill_from_rows,
    slice_leaves,
)
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.schema.checks import check_nonempty
from relive.schema.fields import Path as FieldPath
from relive.schema.fields import iter_leaves
from relive.storage import Memory

_MAX_HEADER_BYTES = 1 << 16
_DICTIONARY_PAGE = 2
_BYTES_PER_NUMBER = {"BOOLEAN": 8, "INT32": 8, "FLOAT": 8, "INT64": 12, "DOUBLE": 12}
"""Memory per number while lists are read, by physical type of the Parquet column."""


def _compute_max_value_bytes(where: str, file: Any, body: BinaryIO, column: int, dataset_bytes: int) -> int:
    """Return the maximum bytes of one value of a column; raise if the pages or lists of the column are too long."""
    column_info, max_bytes = file.schema.column(column), 1
    where = f"{where}: {column_info.path}"
    for number in range(file.metadata.num_row_groups):
        chunk = file.metadata.row_group(number).column(column)
        pages = list(_read_page_headers(body, chunk))
        largest_page = max((page.nbytes for page in pages), default=0)
        num_values = sum(page.num_values for page in pages if not page.is_dictionary)
        is_page_forged = any(page.is_dictionary and page.num_values > page.nbytes for page in pages)
        if num_values != chunk.num_values or is_page_forged:
            raise dataset_error(where, f"{chunk.num_values:,} values", f"pages of {num_values:,}")
        max_bytes = max(max_bytes, _BYTES_PER_NUMBER.get(column_info.physical_type, largest_page))
        # In the worst case, the list in the first row contains all numbers of the row group, so all are counted here.
        list_bytes = max_bytes * num_values if column_info.max_repetition_level else 0
        for needed_bytes, limit in (
            (largest_page, compute_decoding_limit(dataset_bytes) // 2),
            (list_bytes, compute_memory_limit(dataset_bytes)),
        ):
            if needed_bytes > limit:
                raise dataset_error(where, f"pages and lists of at most {limit:,} bytes", f"{needed_bytes:,}")
    return max_bytes


class _ParquetPageHeader(NamedTuple):
    is_dictionary: bool
    nbytes: int
    """Decompressed size of the page."""
    num_values: int


def _read_page_headers(body: BinaryIO, chunk: Any) -> Iterator[_ParquetPageHeader]:
    """Yield the page headers of a column in a row group; pyarrow has no function for them."""
    position = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < position:
        position = chunk.dictionary_page_offset
    stop = position + chunk.total_compressed_size
    while position < stop:
        body.seek(position)
        header_bytes = io.BytesIO(body.read(_MAX_HEADER_BYTES))
        header = _read_thrift_struct(header_bytes)
        num_values = next((header[part][1] for part in (5, 7, 8) if part in header), 0)
        is_dictionary, nbytes, compressed_bytes = header[1] == _DICTIONARY_PAGE, header[2], header[3]
        if min(nbytes, compressed_bytes, num_values) < 0:
            raise ValueError(f"a page of {compressed_bytes} bytes with {num_values} values")
        yield _ParquetPageHeader(is_dictionary, nbytes, num_values)
        position += header_bytes.tell() + compressed_bytes


def _read_thrift_struct(body: BinaryIO, depth: int = 0) -> dict[int, Any]:
    """Parse a struct in Thrift's compact protocol, as a dict from field numbers to values; texts are skipped."""
    if depth > 8:
        raise ValueError("structs inside each other")
    fields: dict[int, Any] = {}
    field = 0
    while head := body.read(1)[0]:
        field = field + (head >> 4) if head >> 4 else _read_zigzag_integer(body)
        kind = head & 15
        # Thrift stores a boolean as its type: 1 is true, 2 is false.
        if kind in (1, 2):
            fields[field] = kind == 1
        elif kind in (4, 5, 6):
            fields[field] = _read_zigzag_integer(body)
        elif kind == 8:
            body.seek(_read_varint(body), io.SEEK_CUR)
        elif kind == 12:
            fields[field] = _read_thrift_struct(body, depth + 1)
        else:
            raise ValueError(f"a value of the kind {kind}")
    return fields


def _read_zigzag_integer(body: BinaryIO) -> int:
    number = _read_varint(body)
    return number >> 1 ^ -(number & 1)


def _read_varint(body: BinaryIO) -> int:
    number = shift = 0
    while True:
        byte = body.read(1)[0]
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number


class _VideoReader:
    """The frames of an .mp4, read in the order of their times."""

    def __init__(self, where: str, path: Path, shape: tuple[int, ...], fps: float) -> None:
        self._where, self._path, self._shape, self._fps = where, path, shape, fps
        self._frames: Iterator[tuple[float, Any]] = iter(())
        self._current_frame: tuple[float, Any] | None = None
        """Time in seconds and pixels of the frame that was decoded last."""

    def read_frame(self, time: float) -> np.ndarray:
        """Return the frame at `time` seconds; raise if no frame is within half a frame of it."""
        if self._current_frame is None or time < self._current_frame[0] - 0.5 / self._fps:
            self._frames = self._decode_frames()
            self._current_frame = next(self._frames, None)
        while self._current_frame is not None and time > self._current_frame[0] + 0.5 / self._fps:
            self._current_frame = next(self._frames, None)
        if self._current_frame is None or time < self._current_frame[0] - 0.5 / self._fps:
            remedy = "Download the dataset again."
            raise dataset_error(self._where, f"a frame at {time:.3f} seconds", "no such frame", remedy)
        return self._current_frame[1].to_ndarray(format="rgb24")

    def _decode_frames(self) -> Iterator[tuple[float, Any]]:
        av = import_extra("av", "lerobot", "PyAV")
        # The file is opened as a file object with a fixed format, so that FFmpeg opens no other file.
        with (
            convert_errors(self._where, "a video that can be read"),
            self._path.open("rb") as file,
            av.open(file, format="mp4") as container,
        ):
            stream = next(iter(container.streams.video), None)
            size = None if stream is None else (stream.height, stream.width)
            if stream is None or size is None or size != self._shape[:2] or self._shape[2] != 3:
                raise dataset_error(self._where, f"frames of {self._shape} pixels and channels", size)
            # The bitstream may declare larger frames than the container; the limit only allows for codecs that round
            # up.
            stream.codec_context.options = {"max_pixels": str((size[0] + 255) * (size[1] + 255))}
            for frame in container.decode(stream):
                if (frame.height, frame.width) != self._shape[:2]:
                    raise dataset_error(self._where, f"frames of {self._shape[:2]}", (frame.height, frame.width))
                yield float(frame.time or 0.0), frame


_NUMBER_DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
_MAX_FPS = 1e6
_TABLE_ROWS_PER_READ = 1 << 12
_TABLE_ROW_BYTES = 500
"""Memory per row of a small table, as Python objects."""

_FIELD_NAMES = {"observation": "obs", "action": "action"}
_NEXT_FIELD_NAMES = {"next.reward": "reward", "next.done": "terminated", "next.truncated": "truncated"}
_FINAL_OBS_FILE = "meta/final_obs.parquet"
"""The file of final observations, which only datasets written by `to_lerobot` have."""
_COUNTER_COLUMNS = ("index", "episode_index", "frame_index", "timestamp")
"""Columns that LeRobot computes itself."""


class _Feature(NamedTuple):
    """One column of a dataset."""

    kind: str
    """ "image", "video", "string", or the dtype of numbers."""
    shape: tuple[int, ...]
    """Shape of the value of one frame; height, width and channels for images."""


def _default_field_path(column: str) -> FieldPath | None:
    """Return the field path of a column by default: ("obs", "images", "top") for "observation.images.top".

    The path is None for the counters and for "task": they become fields only if the caller names them.
    """
    if column in (*_COUNTER_COLUMNS, "task"):
        return None
    first, *rest = column.split(".")
    if first == "next" and rest and f"next.{rest[0]}" in _NEXT_FIELD_NAMES:
        return (_NEXT_FIELD_NAMES[f"next.{rest[0]}"], *rest[1:])
    return (_FIELD_NAMES.get(first, first), *rest)


def resolve_dataset_file(root: Path, name: str) -> Path:
    """Return the path of a file of the dataset; raise if a link points outside the dataset."""
    path, folder = (root / name).resolve(), root.resolve()
    # In the cache of the Hugging Face hub, files of a snapshot are links to blobs, so links to blobs are allowed.
    blobs = root.absolute().parent.parent.resolve() / "blobs"
    is_cached = root.absolute().parent.name == "snapshots" and path.is_relative_to(blobs)
    if not path.is_relative_to(folder) and not is_cached:
        raise dataset_error(f"{root.name}: {name}", "a file inside the dataset", "a link to a file outside")
    return path


def _parse_feature(where: str, description: Any) -> _Feature:
    if not isinstance(description, dict) or not isinstance(description.get("dtype"), str):
        raise dataset_error(where, "a feature with a dtype", reprlib.repr(description))
    kind, names = description["dtype"], description.get("names")
    shape = parse_sizes(f"{where}: shape", description.get("shape"), 1)
    if kind in ("image", "video"):
        if len(shape) != 3:
            raise dataset_error(f"{where}: shape", "height, width and channels", shape)
        if isinstance(names, list) and names and names[0] in ("channel", "channels"):
            shape = (*shape[1:], shape[0])
        return _Feature(kind, shape)
    if kind not in (*_NUMBER_DTYPES, "string"):
        expected = f"one of the dtypes image, video, string, {', '.join(_NUMBER_DTYPES)}"
        raise dataset_error(where, expected, reprlib.repr(kind))
    # LeRobot stores single numbers with shape (1,) too, but without names, so shape (1,) needs names to be a vector.
    return _Feature(kind, () if shape == (1,) and not names else shape)


class _LeRobotSource(RowSource):
    """The frames of a dataset in order, as `meta/info.json` describes them."""

    separator = "."

    def __init__(self, root: Path) -> None:
        self._root, self.name = root, root.name
        where = f"{self.name}: meta/info.json"
        with (
            convert_errors(where, "the description of a LeRobot dataset"),
            resolve_dataset_file(root, "meta/info.json").open("rb") as file,
        ):
            body = file.read(MAX_JSON_BYTES + 1)
        metadata = parse_json(where, body)
        version, features, fps = (metadata.get(key) for key in ("codebase_version", "features", "fps"))
        if not isinstance(version, str) or not version.startswith("v3."):
            remedy = "Convert it with lerobot's convert_dataset_v21_to_v30."
            raise dataset_error(where, "codebase_version v3", reprlib.repr(version), remedy)
        if not isinstance(features, dict) or "episode_index" not in features:
            raise dataset_error(where, "features with 'episode_index'", reprlib.repr(features))
        self._features = {name: _parse_feature(f"{where}: {name}", each) for name, each in features.items()}
        if not _is_valid_fps(fps):
            raise dataset_error(where, "fps, a positive number", reprlib.repr(fps))
        self._fps = float(fps)
        self.nbytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        self._video_starts: dict[str, dict[int, tuple[str, float]]] = {}
        """For each camera and episode: the video file, and the second at which the episode starts in it."""
        self._videos: dict[str, tuple[str, _VideoReader]] = {}
        """For each camera: the file name of the newest video, and the open video."""

    def describe_columns(self, user_columns: Columns) -> dict[str, ColumnSpec]:
        specs = {"task": ColumnSpec((), np.dtype(object), None, is_text=True)} if "task_index" in self._features else {}
        for name, (kind, shape) in self._features.items():
            dtype = np.dtype({"string": object, "image": np.uint8, "video": np.uint8}.get(kind, kind))
            is_text = kind == "string"
            specs[name] = ColumnSpec(() if is_text else shape, dtype, _default_field_path(name), is_text)
        return specs

    def read_rows(self, columns: Sequence[str], max_rows: int) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        files = sorted(path.relative_to(self._root).as_posix() for path in self._root.glob("data/*/*.parquet"))
        if not files:
            remedy = "Download the whole dataset."
            raise dataset_error(self.name, "files data/chunk-…/file-….parquet", "no such file", remedy)
        videos = {name for name in columns if name != "task" and self._features[name].kind == "video"}
        stored_columns = {*columns, "episode_index"} - videos - {"task"}
        stored_columns |= ({"task_index"} if "task" in columns else set()) | ({"timestamp"} if videos else set())
        for file in files:
            for rows in self._read_table_rows(file, sorted(stored_columns), max_rows):
                if "task" in columns:
                    rows["task"] = self._look_up_task_texts(rows["task_index"])
                for name in videos:
                    rows[name] = self._read_video_frames(name, rows["episode_index"], rows["timestamp"])
                yield rows["episode_index"], {name: rows[name] for name in columns}

    def make_final_obs_reader(self, obs_columns: list[str]) -> Callable[[int], dict[str, Any]] | None:
        if not (self._root / _FINAL_OBS_FILE).exists():
            return None
        rows = enumerate(self._read_table_rows(_FINAL_OBS_FILE, sorted(obs_columns), 1))

        def read_row(number: int) -> dict[str, Any]:
            for row_number, columns in rows:
                if row_number == number:
                    return columns
            raise dataset_error(f"{self.name}: {_FINAL_OBS_FILE}", f"a row for episode {number}", "fewer rows")

        return read_row

    def _read_batches(self, file: str, names: list[str], count: int) -> Iterator[Any]:
        """Yield batches of at most `count` rows of the columns `names` of a parquet file.

        Parquet rows may share values: a short file can have billions of rows, or one row of a billion numbers. Batches
        are shorter if the rows could be as long as the longest page.
        """
        where, parquet = f"{self.name}: {file}", import_extra("pyarrow.parquet", "lerobot")
        path = resolve_dataset_file(self._root, file)
        with convert_errors(where, "a parquet file that can be read"), path.open("rb") as body:
            table = parquet.ParquetFile(body)
            column_names = table.schema_arrow.names
            missing_columns = [name for name in names if name not in column_names]
            if missing_columns:
                raise dataset_error(where, f"the column {missing_columns[0]!r}", ", ".join(column_names))
            max_bytes = 1
            for column in range(len(table.schema)):
                if any(f"{table.schema.column(column).path}.".startswith(f"{name}.") for name in names):
                    max_bytes = max(max_bytes, _compute_max_value_bytes(where, table, body, column, self.nbytes))
            count = max(1, min(count, compute_decoding_limit(self.nbytes) // 2 // max_bytes))
            yield from table.iter_batches(count, columns=names, use_threads=False)

    def _read_table_rows(self, file: str, names: list[str], count: int) -> Iterator[dict[str, Any]]:
        """Yield up to `count` rows of a parquet file at a time, as values by feature name."""
        where = f"{self.name}: {file}"
        for batch in self._read_batches(file, names, count):
            yield {name: self._convert_feature_values(f"{where}: {name}", name, batch.column(name)) for name in names}

    def _convert_feature_values(self, where: str, name: str, values: Any) -> Any:
        feature = self._features.get(name)
        if feature is None:
            raise dataset_error(where, "a feature of meta/info.json", "no such feature")
        if feature.kind == "image":
            return _decode_images(where, values, feature.shape)
        if feature.kind == "string":
            texts = values.to_pylist()
            if not all(isinstance(text, str) for text in texts):
                raise dataset_error(where, "texts", values.type)
            return texts
        return _arrow_to_numbers(where, values, feature)

    def _read_small_table(self, file: str, names: list[str]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a small parquet file; raise if they exceed the memory budget of the dataset."""
        where, max_bytes, total_bytes = f"{self.name}: {file}", compute_decoding_limit(self.nbytes), 0
        for batch in self._read_batches(file, names, _TABLE_ROWS_PER_READ):
            columns = [batch.column(name).to_pylist() for name in names]
            total_bytes += batch.nbytes + _TABLE_ROW_BYTES * batch.num_rows
            if total_bytes > max_bytes:
                raise dataset_error(where, f"rows of at most {max_bytes:,} bytes", "more")
            yield from zip(*columns, strict=True)

    def _look_up_task_texts(self, task_indices: np.ndarray) -> list[str]:
        try:
            return [self._task_texts[int(index)] for index in task_indices]
        except KeyError as error:
            raise dataset_error(f"{self.name}: meta/tasks.parquet", "a text for every task_index", error) from error

    @cached_property
    def _task_texts(self) -> dict[int, str]:
        """The text of each task by its index; empty if the dataset has none."""
        file = "meta/tasks.parquet"
        if not (self._root / file).exists():
            return {}
        where = f"{self.name}: {file}"
        with convert_errors(where, "a parquet file that can be read"):
            names = import_extra("pyarrow.parquet", "lerobot").read_schema(resolve_dataset_file(self._root, file)).names
        texts = [name for name in names if name != "task_index"]
        if "task_index" not in names or len(texts) != 1:
            raise dataset_error(where, "the column 'task_index' and one of texts", ", ".join(names))
        tasks: dict[int, str] = {}
        for index, text in self._read_small_table(file, ["task_index", texts[0]]):
            if type(index) is not int or not isinstance(text, str):
                raise dataset_error(where, "a number and a text per task", reprlib.repr((index, text)))
            tasks[index] = text
        return tasks

    def _read_video_frames(self, name: str, episodes: np.ndarray, times: np.ndarray) -> np.ndarray:
        shape = self._features[name].shape
        frames = np.empty((len(episodes), *shape), np.uint8)
        if name not in self._video_starts:
            self._video_starts[name] = self._read_video_positions(name)
        for row, (episode, time) in enumerate(zip(episodes.tolist(), times.tolist(), strict=True)):
            if episode not in self._video_starts[name]:
                raise dataset_error(f"{self.name}: meta/episodes", f"the episode {episode}", "no such episode")
            file, start = self._video_starts[name][episode]
            if self._videos.get(name, ("",))[0] != file:
                path = resolve_dataset_file(self._root, file)
                self._videos[name] = file, _VideoReader(f"{self.name}: {file}", path, shape, self._fps)
            frames[row] = self._videos[name][1].read_frame(start + time)
        return frames

    def _read_video_positions(self, name: str) -> dict[int, tuple[str, float]]:
        positions: dict[int, tuple[str, float]] = {}
        keys = ["episode_index", *(f"videos/{name}/{key}" for key in ("chunk_index", "file_index", "from_timestamp"))]
        for path in sorted(self._root.glob("meta/episodes/*/*.parquet")):
            table = path.relative_to(self._root).as_posix()
            for episode, chunk, file, start in self._read_small_table(table, keys):
                if not all(type(number) is int and 0 <= number < 1 << 40 for number in (episode, chunk, file)):
                    raise dataset_error(f"{self.name}: {table}", "whole numbers", (episode, chunk, file))
                if not isinstance(start, float) or not 0 <= start < 1e12:
                    raise dataset_error(f"{self.name}: {table}", "a time in seconds", start)
                positions[episode] = f"videos/{name}/chunk-{chunk:03d}/file-{file:03d}.mp4", start
        return positions


def _arrow_to_numbers(where: str, values: Any, feature: _Feature) -> np.ndarray:
    """Convert an Arrow column of numbers or nested lists to an array [K, …]."""
    types, compute = import_extra("pyarrow.types", "lerobot"), import_extra("pyarrow.compute", "lerobot")
    # An Arrow extension type wraps its values in `storage`, so the values are unwrapped here.
    count, flat = len(values), getattr(values, "storage", values)
    while True:
        if flat.null_count:
            raise dataset_error(where, "a value in every row", "rows without a value")
        if not (types.is_list(flat.type) or types.is_large_list(flat.type) or types.is_fixed_size_list(flat.type)):
            break
        lengths = compute.unique(compute.list_value_length(flat))
        if len(lengths) > 1:
            raise dataset_error(where, f"shape {feature.shape} in every row", f"lists of {lengths.to_pylist()[:4]}")
        flat = flat.flatten()
    numbers = flat.to_numpy(zero_copy_only=False)
    if numbers.dtype != np.dtype(feature.kind) or numbers.size != count * int(np.prod(feature.shape)):
        expected = f"{feature.kind} of shape {feature.shape} in every row"
        raise dataset_error(where, expected, f"{values.type} with {numbers.size} numbers in {count} rows")
    return numbers.reshape(count, *feature.shape)


_IMAGE_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def _decode_images(where: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Decode PNG and JPEG images to pixels; raise before decoding if the size of an image is not `shape`."""
    types, pillow = import_extra("pyarrow.types", "lerobot"), import_extra("PIL.Image", "lerobot", "Pillow")
    values = getattr(values, "storage", values)
    if not types.is_struct(values.type) or values.type.get_field_index("bytes") < 0:
        raise dataset_error(where, "images as bytes", values.type)
    images = []
    for body in values.field("bytes").to_pylist():
        # An image without bytes is refused: LeRobot would read it from the stored path, which could be any file.
        if body is None:
            raise dataset_error(where, "the bytes of an image", "a path to a file outside")
        with convert_errors(where, "a PNG or JPEG"), pillow.open(io.BytesIO(body), formats=("PNG", "JPEG")) as picture:
            size = (picture.height, picture.width, picture.mode)
            if size != (*shape[:2], _IMAGE_MODES.get(shape[2])):
                raise dataset_error(where, f"an image of {shape} pixels and channels", size)
            images.append(np.asarray(picture).reshape(shape))
    return np.stack(images)


def from_lerobot(
    path: str | PathLike[str],
    buffer: Any = None,
    *,
    columns: Columns | None = None,
    encode: Encoders | None = None,
    final_obs: FinalObs = "repeat",
    sampler: Sampler | None = None,
    device: torch.device | str | Memory = "cpu",
    seed: int | None = None,
) -> Any:
    """Read a LeRobot dataset (v3), block by block, into a buffer; return the buffer.

    The feature `observation.images.top` is the part ("images", "top") of the observation, `action` the action,
    `next.reward` the reward, `next.done` terminated and `next.truncated` truncated; all others, like `task_index`, are
    extra fields. `index`, `episode_index`, `frame_index` and `timestamp` are left out unless `columns` names them, or
    the buffer has extra fields of these names. A dataset without rewards gives 0; an episode that does not end with
    `next.done` is truncated at its last step, unless the dataset has `next.truncated`.

    Images are [height, width, channels] of uint8. So are the frames of videos, which are lossy: they are not the pixels
    that the camera saw, and decoders may differ in their last bits.

    The format has no final observations. A last step stores its own observation as the next one, unless `final_obs`
    drops the step: imitation needs every action, and never looks at the next observation.

    Args:
        path: the folder of the dataset, which has `meta/info.json`.
        buffer: the buffer to fill: a ReplayBuffer, a RolloutBuffer with num_envs=None or a DistillationBuffer. None
            makes a ReplayBuffer with space for all steps, in which float64 becomes float32.
        columns: the fields of features that are not the usual ones: `{"observation.images": None}` leaves out all
            cameras, `{"next.success": "success"}` renames a feature.
        encode: for each feature of texts, a function that turns a text into numbers; each text is encoded once. "task"
            is the text of the task: `{"task": embed}` makes it the extra field "task".
        final_obs: "repeat" stores a truncated last step with its own observation as the next one, from which a learner
            then bootstraps; "drop" leaves it out. None is "drop" with a `DataWarning`.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    import_extra("pyarrow", "lerobot")
    source = _LeRobotSource(Path(path))
    return fill_from_rows(
        "from_lerobot", source, buffer, columns, encode, final_obs, sampler=sampler, device=device, seed=seed
    )


def _is_image(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a field is written as images: uint8 of shape [height, width, 3]."""
    return dtype == np.uint8 and len(shape) == 3 and shape[2] == 3


def _describe_feature(name: str, rows: np.ndarray) -> dict[str, Any]:
    """Return the entry of a column in `meta/info.json`."""
    shape, dtype = rows.shape[1:], rows.dtype
    if _is_image(shape, dtype):
        return {"dtype": "image", "shape": list(shape), "names": ["height", "width", "channels"]}
    if dtype.kind not in "biuf" or len(shape) > 5:
        remedy = "Write the buffer with to_hdf5 or to_zarr."
        raise dataset_error(name, "real numbers with at most 5 axes", f"{dtype} of shape {shape}", remedy)
    return {"dtype": str(dtype), "shape": list(shape or (1,)), "names": ["0"] if shape == (1,) else None}


def _to_arrow(rows: np.ndarray) -> Any:
    """Convert rows [K, …] to an Arrow array: numbers, lists of numbers, or images as lossless PNG."""
    pyarrow, inner = import_extra("pyarrow", "lerobot"), rows.shape[1:]
    if _is_image(inner, rows.dtype):
        png_images = pyarrow.array([_encode_png(pixels) for pixels in rows], pyarrow.binary())
        paths = pyarrow.nulls(len(rows), pyarrow.string())
        return pyarrow.StructArray.from_arrays([png_images, paths], ["bytes", "path"])
    values = pyarrow.array(np.ascontiguousarray(rows).reshape(-1))
    # LeRobot stores a vector of length 1 as a single number, so it gets no list.
    if inner == (1,):
        return values
    if len(inner) == 1:
        return pyarrow.FixedSizeListArray.from_arrays(values, inner[0])
    for size in reversed(inner):
        offsets = np.arange(0, len(values) + 1, size, dtype=np.int32)
        values = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values)
    return values


def _encode_png(pixels: np.ndarray) -> bytes:
    body = io.BytesIO()
    import_extra("PIL.Image", "lerobot", "Pillow").fromarray(pixels).save(body, "PNG", compress_level=1)
    return body.getvalue()


class _FeatureStats:
    """Statistics with which LeRobot's policies normalise a column; for images, per channel and scaled to [0, 1]."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, 0.0, 0.0
        self._min, self._max = np.inf, -np.inf

    def update(self, rows: np.ndarray) -> None:
        """Add rows [K, …] to the statistics."""
        numbers = np.asarray(rows, np.float64)
        if _is_image(rows.shape[1:], rows.dtype):
            numbers = numbers.reshape(-1, 3)[:, :, None, None] / 255
        numbers = numbers if numbers.ndim > 1 else numbers[:, None]
        self._count += len(numbers)
        self._sum, self._squares = self._sum + numbers.sum(0), self._squares + np.square(numbers).sum(0)
        self._min, self._max = np.minimum(self._min, numbers.min(0)), np.maximum(self._max, numbers.max(0))

    def to_json_entry(self) -> dict[str, Any]:
        """Return the entry of the column in `meta/stats.json`."""
        mean = self._sum / self._count
        deviation = np.sqrt(np.maximum(self._squares / self._count - np.square(mean), 0))
        figures = {"min": self._min, "max": self._max, "mean": mean, "std": deviation}
        return {name: np.asarray(each).tolist() for name, each in figures.items()} | {"count": [self._count]}


_MAX_FILE_BYTES = 100_000_000
"""A file of data that has at least this number of bytes gets no further episode."""
_MAX_GROUP_VALUES = 1 << 22
"""Maximum number of values per column and row group, so that a reader needs little memory."""
_FEATURE_NAMES = {field: feature for feature, field in (_FIELD_NAMES | _NEXT_FIELD_NAMES).items()}

_PANDAS_METADATA = {
    "index_columns": ["__index_level_0__"],
    "column_indexes": [],
    "columns": [
        {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, field, kind, numpy in (
            ("task_index", "task_index", "int64", "int64"),
            (None, "__index_level_0__", "unicode", "object"),
        )
    ],
    "pandas_version": "2.0.0",
}
"""Parquet metadata that make pandas use the texts of tasks as the index of the table, in which LeRobot finds them."""


def to_lerobot(replay: ReplayBuffer, path: str | PathLike[str], *, fps: float, tasks: str | Sequence[str] = "") -> None:
    """Write the episodes of a replay buffer as a LeRobot dataset (v3), which `from_lerobot` reads back bit for bit.

    The part "x" of the observation is the feature `observation.x`, an observation without parts `observation.state`;
    `next.reward`, `next.done` (terminated), `next.truncated` and extra fields have features too. Pictures [height,
    width, 3] of uint8 are lossless PNG images. Final observations are in a file of their own, `meta/final_obs.parquet`,
    which LeRobot ignores. The dataset appears when it is whole.

    Args:
        replay: a replay buffer in time order, with at least one step.
        path: the folder, which must not exist.
        fps: steps per second, from which the time of each frame follows.
        tasks: the text of the task, or one text per number of the extra field "task_index".
    """
    import_extra("pyarrow", "lerobot")
    require_time_order("to_lerobot", replay)
    check_nonempty("to_lerobot", len(replay))
    if not _is_valid_fps(fps):
        raise dataset_error("fps", f"a number above 0 and below {_MAX_FPS:g}", repr(fps), "Pass such a number.")
    texts = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        remedy = "Pass a str per number of the extra field 'task_index'."
        raise dataset_error("tasks", "a text, or a list of texts", repr(tasks), remedy)
    with write_atomically("to_lerobot", path) as unfinished:
        _write_dataset(unfinished, replay, fps, list(texts))


def _is_valid_fps(fps: Any) -> TypeGuard[float]:
    return isinstance(fps, int | float) and not isinstance(fps, bool) and 0 < fps < _MAX_FPS


def _write_dataset(root: Path, replay: ReplayBuffer, fps: float, tasks: list[str]) -> None:
    """Write all files of a dataset."""
    features: dict[str, Any] = {}
    stats: dict[str, _FeatureStats] = defaultdict(_FeatureStats)
    episodes: list[dict[str, Any]] = []
    num_frames, files = 0, [_ParquetWriter(root / "data/chunk-000/file-000.parquet")]
    final_obs = _ParquetWriter(root / _FINAL_OBS_FILE)
    for number, episode in enumerate(read_episode_arrays(replay)):
        final_obs.write(_flatten_to_features({"obs": slice_leaves(episode.pop("next_obs"), slice(-1, None))}))
        columns = _flatten_to_features(episode)
        length = len(columns["next.done"])
        index = np.arange(length)
        columns |= {
            "timestamp": (index / fps).astype(np.float32),
            "frame_index": index,
            "episode_index": np.full(length, number),
            "index": index + num_frames,
        }
        columns.setdefault("task_index", np.zeros(length, np.int64))
        task_indices = np.unique(columns["task_index"]).tolist()
        if not all(0 <= task < len(tasks) for task in task_indices):
            remedy = "Pass a text for each number of the extra field 'task_index'."
            raise dataset_error("to_lerobot: tasks", f"a text for {task_indices}", f"{len(tasks)} texts", remedy)
        features = features or {name: _describe_feature(name, rows) for name, rows in columns.items()}
        for name, rows in columns.items():
            stats[name].update(rows)
        if files[-1].nbytes >= _MAX_FILE_BYTES:
            files[-1].close()
            chunk, file = divmod(len(files), 1000)
            files.append(_ParquetWriter(root / f"data/chunk-{chunk:03d}/file-{file:03d}.parquet"))
        files[-1].write(columns)
        chunk, file = divmod(len(files) - 1, 1000)
        episodes.append(
            {
                "episode_index": number, "tasks": [tasks[task] for task in task_indices], "length": length,
                "data/chunk_index": chunk, "data/file_index": file,
                "dataset_from_index": num_frames, "dataset_to_index": num_frames + length,
                "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0,
            }
        )  # fmt: skip
        num_frames += length
    final_obs.close()
    files[-1].close()
    _write_metadata(root, fps, tasks, features, stats, episodes)


def _write_metadata(
    root: Path,
    fps: float,
    tasks: list[str],
    features: dict[str, Any],
    stats: dict[str, _FeatureStats],
    episodes: list[dict[str, Any]],
) -> None:
    pyarrow, parquet = import_extra("pyarrow", "lerobot"), import_extra("pyarrow.parquet", "lerobot")
    table = pyarrow.table({"task_index": np.arange(len(tasks)), "__index_level_0__": tasks})
    parquet.write_table(
        table.replace_schema_metadata({"pandas": json.dumps(_PANDAS_METADATA)}), root / "meta/tasks.parquet"
    )
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
    (root / "meta/stats.json").write_text(
        json.dumps({name: feature_stats.to_json_entry() for name, feature_stats in stats.items()}), "utf-8"
    )
    info = {
        "codebase_version": "v3.0", "robot_type": None, "fps": fps, "chunks_size": 1000,
        "data_files_size_in_mb": 100, "video_files_size_in_mb": 200, "total_tasks": len(tasks),
        "total_episodes": len(episodes), "total_frames": episodes[-1]["dataset_to_index"],
        "splits": {"train": f"0:{len(episodes)}"}, "video_path": None, "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    }  # fmt: skip
    (root / "meta/info.json").write_text(json.dumps(info, indent=4), "utf-8")


class _ParquetWriter:
    """Writes a parquet file, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._writer = path, None
        self.nbytes = 0
        """The uncompressed bytes of all rows written so far."""

    def write(self, columns: dict[str, np.ndarray]) -> None:
        table = import_extra("pyarrow", "lerobot").table({name: _to_arrow(rows) for name, rows in columns.items()})
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = import_extra("pyarrow.parquet", "lerobot").ParquetWriter(self._path, table.schema)
        max_values = max(int(np.prod(rows.shape[1:])) for rows in columns.values())
        self._writer.write_table(table, max(1, _MAX_GROUP_VALUES // max_values))
        self.nbytes += table.nbytes

    def close(self) -> None:
        self._writer.close()  # type: ignore[union-attr]


def _flatten_to_features(fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the leaves of nested fields by feature name."""
    columns = {}
    for (name, *parts), rows in iter_leaves((), fields):
        feature = ".".join([_FEATURE_NAMES.get(name, name), *parts])
        if name in _COUNTER_COLUMNS or "/" in feature or any("." in part for part in parts):
            remedy = "Rename the field: LeRobot counts frames itself, and dots separate names."
            raise dataset_error("to_lerobot", "names that LeRobot can have", repr(feature), remedy)
        columns["observation.state" if feature == "observation" else feature] = rows
    return columns
