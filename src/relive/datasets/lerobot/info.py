"""What a LeRobot dataset (v3) says of itself: its features, its files and its tasks."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relive.datasets.columns import Column
from relive.datasets.installed import required
from relive.datasets.lerobot.parquet import batches
from relive.datasets.metadata import MOST_BYTES, damage_named, parsed, part_of_budget, sizes, wrong
from relive.errors import SchemaError, explain

_NUMBERS = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
_ROWS_AT_ONCE = 1 << 12
_ROW_BYTES = 500
"""The memory that a row of a small table takes in Python."""


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
        with (
            damage_named(where, "the description of a LeRobot dataset"),
            own_file(root, "meta/info.json").open("rb") as file,
        ):
            body = file.read(MOST_BYTES + 1)
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
        self.nbytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        """How many bytes the dataset has on the disk."""

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
        where = f"{self.name}: meta/tasks.parquet"
        with damage_named(where, "a parquet file that can be read"):
            names = required("pyarrow.parquet", "lerobot").read_schema(own_file(self.root, "meta/tasks.parquet")).names
        texts = [name for name in names if name != "task_index"]
        if "task_index" not in names or len(texts) != 1:
            raise wrong(where, "the column 'task_index' and one of texts", ", ".join(names))
        found: dict[int, str] = {}
        for index, text in self.table("meta/tasks.parquet", ["task_index", texts[0]]):
            if type(index) is not int or not isinstance(text, str):
                raise wrong(where, "a number and a text per task", reprlib.repr((index, text)))
            found[index] = text
        return found

    def table(self, file: str, names: list[str]) -> Iterator[tuple[Any, ...]]:
        """The rows of a small parquet file; raises if they take more memory than a dataset of this size may."""
        where, most, total = f"{self.name}: {file}", part_of_budget(self.nbytes), 0
        for batch in batches(where, own_file(self.root, file), names, _ROWS_AT_ONCE, self.nbytes):
            columns = [batch.column(name).to_pylist() for name in names]
            total += batch.nbytes + _ROW_BYTES * batch.num_rows
            if total > most:
                raise wrong(where, f"rows of at most {most:,} bytes", "more")
            yield from zip(*columns, strict=True)


def own_file(root: Path, name: str) -> Path:
    """The path of a dataset's file; raises if a link leads out of the dataset."""
    path, home = (root / name).resolve(), root.resolve()
    # The cache of the Hugging Face hub keeps snapshots as links to its blobs.
    blobs = root.absolute().parent.parent.resolve() / "blobs"
    is_cached = root.absolute().parent.name == "snapshots" and path.is_relative_to(blobs)
    if not path.is_relative_to(home) and not is_cached:
        raise wrong(f"{root.name}: {name}", "a file of the dataset itself", "a link out of it")
    return path


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
