"""The frames of a LeRobot dataset: rows of parquet files, with the pictures that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from relive.datasets.installed import required
from relive.datasets.lerobot.info import Feature, Info, own_file
from relive.datasets.lerobot.parquet import batches
from relive.datasets.lerobot.pictures import Video, image
from relive.datasets.metadata import wrong


class Place(NamedTuple):
    """Where the frames of an episode are in a video."""

    file: str
    start: float
    """The time of the episode's first frame."""


class Frames:
    """Reads rows in the order of a dataset."""

    def __init__(self, info: Info) -> None:
        self._info = info
        self._tasks: dict[int, str] | None = None
        self._places: dict[str, dict[int, Place]] = {}
        self._videos: dict[str, tuple[str, Video]] = {}

    def rows(self, names: Iterable[str], count: int) -> Iterator[dict[str, Any]]:
        """Up to `count` rows at a time: numbers [K, …] or texts by column, always with "episode_index"."""
        wanted = list(names)
        stored = {name for name in wanted if name != "task" and self._info.features[name].kind != "video"}
        stored |= {"episode_index"} | ({"task_index"} if "task" in wanted else set())
        if any(name != "task" and self._info.features[name].kind == "video" for name in wanted):
            stored |= {"timestamp"}
        for file, path in self._info.data_files.items():
            where = f"{self._info.name}: {file}"
            for batch in batches(where, path, sorted(stored), count, self._info.nbytes):
                found = {name: self._column(f"{where}: {name}", name, batch.column(name)) for name in sorted(stored)}
                for name in wanted:
                    if name == "task":
                        found[name] = self._task_texts(found["task_index"])
                    elif self._info.features[name].kind == "video":
                        found[name] = self._video(name, found["episode_index"], found["timestamp"])
                yield found

    def finals(self, file: str, names: list[str]) -> Callable[[int], dict[str, Any]] | None:
        """The rows of a file with one row per episode, by the episode's number, asked for in order; None without it."""
        if not (self._info.root / file).exists():
            return None
        where = f"{self._info.name}: {file}"
        rows = enumerate(batches(where, own_file(self._info.root, file), sorted(names), 1, self._info.nbytes))

        def row(number: int) -> dict[str, Any]:
            for found, batch in rows:
                if found == number:
                    return {name: self._column(f"{where}: {name}", name, batch.column(name)) for name in names}
            raise wrong(where, f"a row for episode {number}", "fewer rows")

        return row

    def _column(self, where: str, name: str, values: Any) -> Any:
        feature = self._info.features.get(name)
        if feature is None:
            raise wrong(where, "a feature of meta/info.json", "no such feature")
        if feature.kind == "image":
            return _images(where, values, feature.shape)
        if feature.kind == "string":
            texts = values.to_pylist()
            if not all(isinstance(text, str) for text in texts):
                raise wrong(where, "texts", values.type)
            return texts
        return _numbers(where, values, feature)

    def _task_texts(self, indices: np.ndarray) -> list[str]:
        if self._tasks is None:
            self._tasks = self._info.tasks()
        try:
            return [self._tasks[int(index)] for index in indices]
        except KeyError as error:
            raise wrong(f"{self._info.name}: meta/tasks.parquet", "a text for every task_index", error) from error

    def _video(self, name: str, episodes: np.ndarray, times: np.ndarray) -> np.ndarray:
        feature = self._info.features[name]
        frames = np.empty((len(episodes), *feature.shape), np.uint8)
        if name not in self._places:
            self._places[name] = _places(self._info, name)
        for row, (episode, time) in enumerate(zip(episodes.tolist(), times.tolist(), strict=True)):
            place = self._places[name].get(episode)
            if place is None:
                raise wrong(f"{self._info.name}: meta/episodes", f"the episode {episode}", "no such episode")
            file, video = self._videos.get(name, ("", None))
            if video is None or file != place.file:
                where = f"{self._info.name}: {place.file}"
                video = Video(where, own_file(self._info.root, place.file), feature.shape, self._info.fps)
                self._videos[name] = place.file, video
            frames[row] = video.frame(place.start + time)
        return frames


def _numbers(where: str, values: Any, feature: Feature) -> np.ndarray:
    """Numbers [K, …] of a column, which may be nested lists."""
    types, compute = required("pyarrow.types", "lerobot"), required("pyarrow.compute", "lerobot")
    count, flat = len(values), getattr(values, "storage", values)  # the storage of an extension type
    while True:
        if flat.null_count:
            raise wrong(where, "a value in every row", "rows without a value")
        if not (types.is_list(flat.type) or types.is_large_list(flat.type) or types.is_fixed_size_list(flat.type)):
            break
        lengths = compute.unique(compute.list_value_length(flat))
        if len(lengths) > 1:
            raise wrong(where, f"shape {feature.shape} in every row", f"lists of {lengths.to_pylist()[:4]}")
        flat = flat.flatten()
    found = flat.to_numpy(zero_copy_only=False)
    if found.dtype != np.dtype(feature.kind) or found.size != count * int(np.prod(feature.shape)):
        expected = f"{feature.kind} of shape {feature.shape} in every row"
        raise wrong(where, expected, f"{values.type} with {found.size} numbers in {count} rows")
    return found.reshape(count, *feature.shape)


def _images(where: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    types = required("pyarrow.types", "lerobot")
    values = getattr(values, "storage", values)
    if not types.is_struct(values.type) or values.type.get_field_index("bytes") < 0:
        raise wrong(where, "images as bytes", values.type)
    bodies = values.field("bytes").to_pylist()
    return np.stack([image(where, body, shape) for body in bodies])


def _places(info: Info, name: str) -> dict[int, Place]:
    """Where each episode is in the videos of a camera."""
    found: dict[int, Place] = {}
    keys = ["episode_index", *(f"videos/{name}/{key}" for key in ("chunk_index", "file_index", "from_timestamp"))]
    for path in sorted(info.root.glob("meta/episodes/*/*.parquet")):
        where = f"{info.name}: {path.relative_to(info.root).as_posix()}"
        for episode, chunk, file, start in info.table(path.relative_to(info.root).as_posix(), keys):
            if not all(type(number) is int and 0 <= number < 1 << 40 for number in (episode, chunk, file)):
                raise wrong(where, "whole numbers", (episode, chunk, file))
            if not isinstance(start, float) or not 0 <= start < 1e12:
                raise wrong(where, "a time in seconds", start)
            found[episode] = Place(f"videos/{name}/chunk-{chunk:03d}/file-{file:03d}.mp4", start)
    return found
