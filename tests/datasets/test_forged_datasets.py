"""Forged files for `from_hdf5`, `from_zarr` and `from_lerobot` are refused with an error that names them."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.datasets import from_hdf5, from_lerobot, from_zarr
from relive.datasets.lerobot import resolve_dataset_file
from tests.datasets.test_hostile_files import HOSTILE, SECRET

h5py = pytest.importorskip("h5py", reason='needs HDF5: pip install ".[hdf5]"')
numcodecs = pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')
pyarrow = pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')
parquet = pytest.importorskip("pyarrow.parquet", reason='needs pyarrow: pip install ".[lerobot]"')

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a secret that no dataset may read."""
    (tmp_path / "secret").write_bytes(SECRET)
    with h5py.File(tmp_path / "secret.hdf5", "w") as file:
        file["rewards"] = np.frombuffer(SECRET[:32], np.float64)
    return tmp_path


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("group", ["data/demo_0", "/"])
def test_an_hdf5_file_that_refers_to_other_files_is_refused(name: str, group: str, outside: Path) -> None:
    forge, words = HOSTILE[name]
    path = outside / "f.hdf5"
    shutil.copy(SAMPLES / ("d4rl.hdf5" if group == "/" else "robomimic.hdf5"), path)
    with h5py.File(path, "a") as file:
        if "infos" in file[group]:
            del file[group]["infos"]
        forge(file[group], outside)
    with pytest.raises(rl.SchemaError, match=f"f.hdf5: .*{words}"):
        from_hdf5(path)


@pytest.mark.parametrize(
    "value",
    [
        np.array([(1, 2.0)] * 4, [("a", "i4"), ("b", "f8")]),
        np.array([b"ab"] * 4, "V2"),
        np.zeros((4, 0)),
    ],
    ids=["compound", "opaque", "empty"],
)
def test_only_numbers_are_columns(value: np.ndarray, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        file["data/demo_0/obs/x"], file["data/demo_0/actions"] = np.zeros((4, 1)), np.zeros((4, 1))
        file["data/demo_0/more"] = value
    with pytest.raises(rl.SchemaError, match="f.hdf5: more: expected numbers"):
        from_hdf5(tmp_path / "f.hdf5")
    assert len(from_hdf5(tmp_path / "f.hdf5", columns={"more": None}, final_obs="drop")) == 3


def test_lists_of_different_lengths_are_no_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        demo = file.create_group("data/demo_0")
        demo["obs/x"], demo["actions"] = np.zeros((4, 1)), np.zeros((4, 1))
        demo.create_dataset("more", (4,), h5py.vlen_dtype(np.int32))[:] = [np.arange(n) for n in range(1, 5)]
    with pytest.raises(rl.SchemaError, match="f.hdf5: more: expected numbers, got dtype object"):
        from_hdf5(tmp_path / "f.hdf5")


@pytest.mark.parametrize("name", ["more", "rewards", "dones", "actions"])
def test_an_hdf5_array_without_a_shape_has_no_rows(name: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        arrays = {"obs/x": np.zeros((4, 1)), "actions": np.zeros((4, 1)), name: h5py.Empty("f4")}
        for array, value in arrays.items():
            file[f"data/demo_0/{array}"] = value
    with pytest.raises(rl.SchemaError, match=rf"f.hdf5: data/demo_0/{name}: expected .*, got shape None"):
        from_hdf5(tmp_path / "f.hdf5")
    if name == "more":
        assert len(from_hdf5(tmp_path / "f.hdf5", columns={"more": None}, final_obs="drop")) == 3


def test_an_hdf5_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        h5py.h5g.create(file.create_group("data").id, b"demo\xff")
    with pytest.raises(rl.SchemaError, match=r"f.hdf5: /data: expected names in UTF-8, got b'demo\\xff'"):
        from_hdf5(tmp_path / "f.hdf5")


@pytest.fixture
def store(outside: Path) -> Path:
    shutil.copytree(SAMPLES / "diffusion_policy.zarr", outside / "s.zarr")
    return outside / "s.zarr"


def change_metadata(path: Path, **changes: Any) -> None:
    file = path / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def _chunk_link(path: Path) -> None:
    (path / "data/state/0.0").unlink()
    (path / "data/state/0.0").symlink_to(path.parent / "secret")
    change_metadata(path / "data/state", compressor=None, chunks=[12, 6])


def _folder_link(path: Path) -> None:
    shutil.move(path / "data", path.parent / "elsewhere")
    (path / "data").symlink_to(path.parent / "elsewhere")


def _pipe(path: Path) -> None:
    os.mkfifo(path / "data/state/1.0")


def _pickled_objects(path: Path) -> None:
    (path / "data/state/0.0").write_bytes(pickle.dumps(Bomb()))
    change_metadata(path / "data/state", dtype="|O", compressor=None, filters=[{"id": "pickle"}])


def _pickle_codec(path: Path) -> None:
    (path / "data/state/0.0").write_bytes(pickle.dumps(Bomb()))
    change_metadata(path / "data/state", compressor={"id": "pickle"})


def _zlib_bomb(path: Path) -> None:
    (path / "data/state/0.0").write_bytes(zlib.compress(bytes(3_000_000)))
    change_metadata(path / "data/state", compressor={"id": "zlib"})


def _blosc_claim(path: Path) -> None:
    body = bytearray((path / "data/state/0.0").read_bytes())
    struct.pack_into("<I", body, 4, 2**31 - 1)
    (path / "data/state/0.0").write_bytes(body)


def _zstd_claim(path: Path) -> None:
    header = struct.pack("<IBQ", 0xFD2FB528, 0b11100000, 1 << 60)
    (path / "data/state/0.0").write_bytes(header + bytes(20))
    change_metadata(path / "data/state", compressor={"id": "zstd"})


def _steps_without_bytes(path: Path) -> None:
    for array in (path / "data").iterdir():
        if array.is_dir():
            change_metadata(array, shape=[1 << 40, *json.loads((array / ".zarray").read_text())["shape"][1:]])
    (path / "meta/episode_ends/0").write_bytes(struct.pack("<3Q", 4, 7, 1 << 40))
    change_metadata(path / "meta/episode_ends", compressor=None)


def _no_growing_ends(path: Path) -> None:
    (path / "meta/episode_ends/0").write_bytes(struct.pack("<3Q", 7, 4, 12))
    change_metadata(path / "meta/episode_ends", compressor=None)


FORGED_STORES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link as a chunk": (_chunk_link, "data/state/0.0: expected a regular file, got a link"),
    "a link as a folder": (_folder_link, "data: expected a regular file, got a link"),
    "a pipe": (_pipe, "expected a regular file, got a device or pipe"),
    "pickled objects": (_pickled_objects, "data/state: expected a dtype of numbers, got '|O'"),
    "pickle as a compressor": (_pickle_codec, "data/state: expected one of the compressors blosc, .* got 'pickle'"),
    "a bomb of zlib": (_zlib_bomb, "data/state/0.0: expected 96 bytes, got 97"),
    "a claim in blosc": (_blosc_claim, "data/state/0.0: expected 96 bytes, got 2,147,483,647"),
    "a claim in zstd": (_zstd_claim, "data/state/0.0: expected 96 bytes, got 1,152,921,504,606,846,976"),
    "steps without bytes": (
        _steps_without_bytes,
        "expected an array whose chunks are all stored|chunks that are stored",
    ),
    "ends that do not grow": (_no_growing_ends, "meta/episode_ends: expected numbers that grow"),
    "huge chunks": (
        lambda path: change_metadata(path / "data/state", chunks=[1 << 40, 2]),
        "expected chunks of at most",
    ),
    "huge rows": (
        lambda path: change_metadata(path / "data/state", shape=[12, 1 << 50], chunks=[1, 1 << 20]),
        "data/state: expected (chunks that are stored|steps that fit)",
    ),
    "no shape": (lambda path: change_metadata(path / "data/state", shape=[], chunks=[]), "expected an axis of steps"),
    "a negative shape": (
        lambda path: change_metadata(path / "data/state", shape=[-1, 2]),
        "expected a list of at most 16 sizes",
    ),
    "a fill value that is a text": (
        lambda path: change_metadata(path / "data/state", fill_value="x"),
        "a number as fill value",
    ),
    "other rows": (lambda path: change_metadata(path / "data/state", shape=[11, 2]), "data/state: expected 12 rows"),
    "JSON without end": (
        lambda path: (path / "data/state/.zarray").write_text("[" * 100_000),
        "expected JSON",
    ),
    "JSON of megabytes": (
        lambda path: (path / "data/state/.zarray").write_text(" " * (1 << 22)),
        "data/state/.zarray: expected at most 2,097,152 bytes",
    ),
    "fields that are no lists": (
        lambda path: (path / ".zattrs").write_text('{"relive_fields": {"state": "obs"}}'),
        ".zattrs: expected lists of names",
    ),
}


@pytest.mark.parametrize("name", FORGED_STORES)
def test_a_forged_store_is_refused(name: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge, words = FORGED_STORES[name]
    forge(store)
    monkeypatch.chdir(store.parent)
    with pytest.raises(rl.SchemaError, match=words) as raised:
        from_zarr(store)
    assert "s.zarr" in str(raised.value) or "state" in str(raised.value)
    assert not (store.parent / "ran").exists()


def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.zip"
    with zipfile.ZipFile(SAMPLES / "diffusion_policy.zarr.zip") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            body = bytes(1 << 24) if name == "data/state/0.0" else old.read(name)
            new.writestr(name, body, zipfile.ZIP_DEFLATED)
    with pytest.raises(rl.SchemaError, match="s.zip: data/state/0.0: expected at most 4,204 bytes, got 16,777,216"):
        from_zarr(path)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.zip"
    shutil.copy(SAMPLES / "diffusion_policy.zarr.zip", path)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("data/state/0.0", b"other")
    with pytest.raises(rl.SchemaError, match="s.zip: expected at most .* files with distinct names"):
        from_zarr(path)


@pytest.fixture
def dataset(outside: Path) -> Path:
    shutil.copytree(SAMPLES / "lerobot", outside / "set")
    return outside / "set"


def replace_column(dataset: Path, name: str, values: Any) -> None:
    file = dataset / "data/chunk-000/file-000.parquet"
    table = parquet.read_table(file)
    parquet.write_table(table.set_column(table.column_names.index(name), name, values), file)


def feature(dataset: Path, name: str, **changes: Any) -> None:
    file = dataset / "meta/info.json"
    info = json.loads(file.read_text())
    info["features"].setdefault(name, {})
    info["features"][name] |= changes
    file.write_text(json.dumps(info))


def png(shape: tuple[int, ...]) -> bytes:
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")
    body = io.BytesIO()
    pillow.fromarray(np.zeros(shape, np.uint8)).save(body, "PNG")
    return body.getvalue()


def images(dataset: Path, bodies: list[bytes | None], path: str | None = None) -> None:
    rows = [{"bytes": body, "path": path} for body in bodies]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    replace_column(dataset, "observation.images.wrist", pyarrow.array(rows, kind))


def lists(rows: list[list[float]], kind: Any = None) -> Any:
    return pyarrow.array(rows, pyarrow.list_(kind or pyarrow.float32()))


def _video_elsewhere(dataset: Path) -> None:
    old = dataset / "videos/observation.images.top/chunk-000/file-000.mp4"
    shutil.move(old, dataset.parent / "other.mp4")
    old.symlink_to(dataset.parent / "other.mp4")


def _data_elsewhere(dataset: Path) -> None:
    old = dataset / "data/chunk-000/file-000.parquet"
    shutil.move(old, dataset.parent / "other.parquet")
    old.symlink_to(dataset.parent / "other.parquet")


def _path_in_a_name(dataset: Path) -> None:
    feature(dataset, "../../../..", dtype="video", shape=[64, 64, 3])
    file = dataset / "meta/episodes/chunk-000/file-000.parquet"
    table = parquet.read_table(file)
    for key in ("chunk_index", "file_index", "from_timestamp"):
        old = table.column(f"videos/observation.images.top/{key}")
        table = table.append_column(f"videos/../../../../{key}", old)
    parquet.write_table(table, file)


FORGED_DATASETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a path for an image": (lambda d: images(d, [None] * 12, "/etc/passwd"), "the bytes of an image, got a path"),
    "another size": (lambda d: images(d, [png((9, 10, 3))] * 12), "expected an image of .8, 10, 3. .* got .9, 10"),
    "a huge image": (lambda d: images(d, [png((2000, 2000, 3))] * 12), "expected an image of .8, 10, 3."),
    "no image": (lambda d: images(d, [b"GIF89a"] * 12), "observation.images.wrist: expected a PNG or JPEG"),
    "a link to a video": (_video_elsewhere, "file-000.mp4: expected a file inside the dataset, got a link to"),
    "a link to data": (_data_elsewhere, "file-000.parquet: expected a file inside the dataset, got a link to"),
    "a path in a name": (_path_in_a_name, "expected (a file inside the dataset|names like)"),
    "texts for numbers": (
        lambda d: replace_column(d, "next.reward", pyarrow.array(["a"] * 12)), "next.reward: expected float32"
    ),
    "rows without a value": (
        lambda d: replace_column(d, "next.reward", pyarrow.array([None] * 12, pyarrow.float32())),
        "next.reward: expected a value in every row",
    ),
    "lists of any length": (
        lambda d: replace_column(d, "action", lists([[0.0] * (i % 3) for i in range(12)])),
        "action: expected shape .2,. in every row",
    ),
    "longer lists": (
        lambda d: replace_column(d, "action", lists([[0.0] * 3] * 12)),
        "action: expected float32 of shape .2,. in every row",
    ),
    "another dtype": (
        lambda d: replace_column(d, "action", lists([[0.0] * 2] * 12, pyarrow.float64())),
        "action: expected float32 of shape .2,. in every row",
    ),
    "flags of 2": (
        lambda d: (feature(d, "next.done", dtype="int64"), replace_column(d, "next.done", pyarrow.array([2] * 12)))[0],
        "next.done: expected a 0 or 1 per step",
    ),
    "a column that is not there": (
        lambda d: feature(d, "speed", dtype="float32", shape=[1]), "expected the column 'speed'"
    ),
    "a huge shape": (lambda d: feature(d, "action", shape=[1 << 50]), "set: action: expected steps that fit into"),
    "an unknown dtype": (lambda d: feature(d, "action", dtype="object"), "action: expected one of the dtypes image"),
    "no video": (
        lambda d: (d / "videos/observation.images.top/chunk-000/file-000.mp4").write_bytes(SECRET),
        "file-000.mp4: expected a video that can be read",
    ),
    "a video of another size": (
        lambda d: feature(d, "observation.images.top", shape=[32, 32, 3]), "mp4: expected frames of .32, 32, 3."
    ),
    "no files": (lambda d: shutil.rmtree(d / "data"), "set: expected files data/chunk-…/file-….parquet"),
    "no description": (lambda d: (d / "meta/info.json").unlink(), "set: meta/info.json: expected the description"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED_DATASETS)
def test_a_forged_lerobot_dataset_is_refused(name: str, dataset: Path) -> None:
    pytest.importorskip("av", reason='needs PyAV: pip install ".[lerobot]"')
    forge, words = FORGED_DATASETS[name]
    forge(dataset)
    with pytest.raises(rl.SchemaError, match=words):
        from_lerobot(dataset)


def test_a_path_outside_the_dataset_is_refused(dataset: Path) -> None:
    for name in ("../secret", "videos/../../secret", str(dataset.parent / "secret")):
        with pytest.raises(rl.SchemaError, match="expected a file inside the dataset, got a link to a file outside"):
            resolve_dataset_file(dataset, name)
    assert resolve_dataset_file(dataset, "meta/info.json").exists()


def test_links_of_a_hub_snapshot_to_its_blobs_are_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--someone--counting/snapshots/0123"
    shutil.copytree(SAMPLES / "lerobot", snapshot)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate([file for file in snapshot.rglob("*") if file.is_file()]):
        shutil.move(file, blobs / str(number))
        file.symlink_to(blobs / str(number))
    assert len(from_lerobot(snapshot, columns={"observation.images": None})) == 12
