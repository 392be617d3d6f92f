"""What a LeRobot dataset (v3) says of itself: its features, its files and its tasks."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relive.datasets.columns import Column
from relive.datasets.installed import required
from relive.datasets.metadata import damage_named, parsed, sizes, wrong
from relive.errors import SchemaError, explain

_NUMBERS = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
_MOST_TASKS = 1 << 20


class Feature(NamedTuple):
    """One column of a dataset."""

    kind: str
    """ "image", "video", "string", or the dtype of numbers."""
    shape: tuple[int, ...]
    """The shape in one frame; height, width and channels of a picture."""

    @property
    def column(self) -> Column:
        """What one step has in this column."""
        if self.kind == "string":
            return Column((), np.dtype(object), "")
        return Column(self.shape, np.dtype(np.uint8 if self.is_picture else self.kind))

    @property
    def is_picture(self) -> bool:
        """Whether it is an image or a frame of a video."""
        return self.kind in ("image", "video")


class Info:
    """The documents in the folder `meta`."""

    def __init__(self, root: Path) -> None:
        self.root, self.name = root, root.name
        where = f"{self.name}: meta/info.json"
        with damage_named(where, "the description of a LeRobot dataset"):
            body = own_file(root, "meta/info.json").read_bytes()
        about = parsed(where, body)
        version = about.get("codebase_version")
        if not isinstance(version, str) or not version.startswith("v3."):
            remedy = "Convert it with lerobot's convert_dataset_v21_to_v30."
            raise SchemaError(explain(where, "codebase_version v3", reprlib.repr(version), remedy))
        features = about.get("features")
        if not isinstance(features, dict) or "episode_index" not in features:
            raise wrong(where, "features with 'episode_index'", reprlib.repr(features))
        self.features = {name: _feature(f"{where}: {name}", each) for name, each in features.items()}
        fps = about.get("fps")
        if type(fps) not in (int, float) or not 0 < fps < 1e6:  # type: ignore[operator]
            raise wrong(where, "fps, a positive number", reprlib.repr(fps))
        self.fps = float(fps)  # type: ignore[arg-type]

    @property
    def data_files(self) -> dict[str, Path]:
        """The files of all frames by their names, in order."""
        found = sorted(path.relative_to(self.root).as_posix() for path in self.root.glob("data/*/*.parquet"))
        if not found:
            remedy = "Download the whole dataset."
            raise SchemaError(explain(self.name, "files data/chunk-…/file-….parquet", "no such file", remedy))
        return {name: own_file(self.root, name) for name in found}

    def tasks(self) -> dict[int, str]:
        """The text of each task by its index; empty if the dataset has none."""
        if not (self.root / "meta/tasks.parquet").exists():
            return {}
        where, path = f"{self.name}: meta/tasks.parquet", own_file(self.root, "meta/tasks.parquet")
        table = read_table(where, path, None)
        texts = [name for name in table.column_names if name != "task_index"]
        if "task_index" not in table.column_names or len(texts) != 1 or table.num_rows > _MOST_TASKS:
            raise wrong(where, "the column 'task_index' and one of texts", ", ".join(table.column_names))
        pairs = zip(table.column("task_index").to_pylist(), table.column(texts[0]).to_pylist(), strict=True)
        found = dict(pairs)
        if not all(type(index) is int and isinstance(text, str) for index, text in found.items()):
            raise wrong(where, "a number and a text per task", reprlib.repr(found))
        return found


def own_file(root: Path, name: str) -> Path:
    """The path of a dataset's file; raises if a link leads out of the dataset."""
    path, home = (root / name).resolve(), root.resolve()
    # The cache of the Hugging Face hub keeps snapshots as links to its blobs.
    blobs = root.absolute().parent.parent.resolve() / "blobs"
    is_cached = root.absolute().parent.name == "snapshots" and path.is_relative_to(blobs)
    if not path.is_relative_to(home) and not is_cached:
        raise wrong(f"{root.name}: {name}", "a file of the dataset itself", "a link out of it")
    return path


def read_table(where: str, path: Path, columns: list[str] | None) -> Any:
    """A small parquet file as a whole."""
    parquet = required("pyarrow.parquet", "lerobot")
    with damage_named(where, "a parquet file that can be read"):
        return parquet.ParquetFile(path).read(columns)


def _feature(where: str, about: Any) -> Feature:
    if not isinstance(about, dict) or not isinstance(about.get("dtype"), str):
        raise wrong(where, "a feature with a dtype", reprlib.repr(about))
    kind, shape = about["dtype"], sizes(f"{where}: shape", about.get("shape"), 1)
    if kind in ("image", "video"):
        if len(shape) != 3:
            raise wrong(f"{where}: shape", "height, width and channels", shape)
        names = about.get("names")
        if isinstance(names, list) and names and names[0] in ("channel", "channels"):
            shape = (*shape[1:], shape[0])
        return Feature(kind, shape)
    if kind not in (*_NUMBERS, "string"):
        raise wrong(where, f"one of the dtypes image, video, string, {', '.join(_NUMBERS)}", reprlib.repr(kind))
    # LeRobot keeps one number per frame without an axis; names say that it is a vector of length 1.
    return Feature(kind, () if shape == (1,) and not about.get("names") else shape)
