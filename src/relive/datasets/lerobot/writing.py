"""Writing the episodes of a replay buffer as a LeRobot dataset (v3)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from relive.datasets.blocks import sliced
from relive.datasets.episodes import appearing, require_steps, written
from relive.datasets.installed import required
from relive.datasets.lerobot.reading import FINAL_OBS, NAMES, NEXT
from relive.datasets.lerobot.tables import Moments, column_of, feature_of
from relive.errors import SchemaError, explain
from relive.fields.schema import leaves_of
from relive.replay.buffer import ReplayBuffer

_FILE_BYTES = 100_000_000
_GROUP_VALUES = 1 << 22
"""The most numbers of a column in a row group, from which a reader knows how long its lists can be."""
_FEATURES = {field: feature for feature, field in (NAMES | NEXT).items()}
_COUNTED = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}

_PANDAS = {
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
"""What makes the texts the index of a pandas table."""


def to_lerobot(replay: ReplayBuffer, path: str | PathLike[str], *, fps: float, tasks: str | Sequence[str] = "") -> None:
    """Write the episodes of a replay buffer as a LeRobot dataset (v3), which `from_lerobot` reads back bit for bit.

    The part "x" of the observation is the feature `observation.x`, an observation without parts `observation.state`;
    `next.reward`, `next.done` (terminated), `next.truncated` and extra fields have features too. Pictures [height,
    width, 3] of uint8 are lossless PNG images. Final observations are in a file of their own, `meta/final_obs.parquet`,
    which LeRobot ignores. The dataset appears when it is whole.

    Args:
        replay: a replay buffer in time order, with at least one step.
        path: the folder, which must not exist.
        fps: steps per second, which say the time of each frame.
        tasks: the text of the task; or a text for each number of the extra field "task_index".
    """
    required("pyarrow", "lerobot")
    require_steps("to_lerobot", replay)
    with appearing("to_lerobot", path) as unfinished:
        _Dataset(unfinished, fps, [tasks] if isinstance(tasks, str) else list(tasks)).write(replay)


class _Dataset:
    """A dataset in the making."""

    def __init__(self, root: Path, fps: float, tasks: list[str]) -> None:
        self._root, self._fps, self._tasks = root, fps, tasks
        self._features: dict[str, Any] = {}
        self._moments: dict[str, Moments] = defaultdict(Moments)
        self._episodes: list[dict[str, Any]] = []
        self._frames, self._file = 0, -1
        self._file_bytes = _FILE_BYTES
        self._writer: Any = None

    def write(self, replay: ReplayBuffer) -> None:
        final = _File(self._root / FINAL_OBS)
        for episode in written(replay):
            next_obs = episode.pop("next_obs")
            self._write_episode(dict(_columns(episode)))
            final.write(dict(_columns({"obs": sliced(next_obs, slice(-1, None))})))
        final.close()
        self._writer.close()
        self._write_metadata()

    def _write_episode(self, columns: dict[str, np.ndarray]) -> None:
        count, number = (
            len(columns["action"]) if "action" in columns else len(columns["next.done"]),
            len(self._episodes),
        )
        index = np.arange(count)
        columns |= {
            "timestamp": (index / self._fps).astype(np.float32),
            "frame_index": index,
            "episode_index": np.full(count, number),
            "index": index + self._frames,
        }
        columns.setdefault("task_index", np.zeros(count, np.int64))
        named = np.unique(columns["task_index"]).tolist()
        if not all(0 <= task < len(self._tasks) for task in named):
            remedy = "Pass a text for each number of the extra field 'task_index'."
            raise SchemaError(explain("to_lerobot: tasks", f"a text for {named}", f"{len(self._tasks)} texts", remedy))
        self._features = self._features or {name: feature_of(name, rows) for name, rows in columns.items()}
        for name, rows in columns.items():
            self._moments[name].update(rows)
        if self._file_bytes >= _FILE_BYTES:
            self._next_file()
        self._file_bytes += self._writer.write(columns)
        place = {"data/chunk_index": self._file // 1000, "data/file_index": self._file % 1000}
        place |= {"dataset_from_index": self._frames, "dataset_to_index": self._frames + count}
        place |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        texts = [self._tasks[task] for task in named]
        self._episodes.append({"episode_index": number, "tasks": texts, "length": count, **place})
        self._frames += count

    def _next_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._file, self._file_bytes = self._file + 1, 0
        name = f"chunk-{self._file // 1000:03d}/file-{self._file % 1000:03d}.parquet"
        self._writer = _File(self._root / "data" / name)

    def _write_metadata(self) -> None:
        pyarrow, meta = required("pyarrow", "lerobot"), self._root / "meta"
        parquet = required("pyarrow.parquet", "lerobot")
        tasks = pyarrow.table({"task_index": np.arange(len(self._tasks)), "__index_level_0__": self._tasks})
        tasks = tasks.replace_schema_metadata({"pandas": json.dumps(_PANDAS)})  # LeRobot looks tasks up by their text
        parquet.write_table(tasks, meta / "tasks.parquet")
        (meta / "episodes/chunk-000").mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist(self._episodes), meta / "episodes/chunk-000/file-000.parquet")
        stats = {name: moments.as_json() for name, moments in self._moments.items()}
        (meta / "stats.json").write_text(json.dumps(stats), "utf-8")
        info = {
            "codebase_version": "v3.0", "robot_type": None, "fps": self._fps, "chunks_size": 1000,
            "data_files_size_in_mb": 100, "video_files_size_in_mb": 200, "total_tasks": len(self._tasks),
            "total_episodes": len(self._episodes), "total_frames": self._frames,
            "splits": {"train": f"0:{len(self._episodes)}"}, "video_path": None, "features": self._features,
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        }  # fmt: skip
        (meta / "info.json").write_text(json.dumps(info, indent=4), "utf-8")


class _File:
    """A parquet file that grows by row groups."""

    def __init__(self, path: Path) -> None:
        self._path, self._writer = path, None

    def write(self, columns: dict[str, np.ndarray]) -> int:
        """Append rows; returns how many bytes they have in memory."""
        table = required("pyarrow", "lerobot").table({name: column_of(rows) for name, rows in columns.items()})
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = required("pyarrow.parquet", "lerobot").ParquetWriter(self._path, table.schema)
        most = max(int(np.prod(rows.shape[1:])) for rows in columns.values())
        self._writer.write_table(table, max(1, _GROUP_VALUES // most))
        return table.nbytes

    def close(self) -> None:
        self._writer.close()  # type: ignore[union-attr]


def _columns(tree: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name, part in tree.items():
        for parts, leaf in leaves_of((_FEATURES.get(name, name),), part):
            feature = "observation.state" if parts == ("observation",) else ".".join(parts)
            if name in _COUNTED or any("." in part or "/" in part for part in parts[1:]) or "/" in name:
                remedy = "Rename the field: LeRobot counts frames itself, and dots separate names."
                raise SchemaError(explain("to_lerobot", "names that LeRobot can have", repr(feature), remedy))
            yield feature, leaf
