"""C12: small datasets that would need much memory are refused; the limit is 64 MiB plus 20 times the file."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.datasets import from_hdf5, from_lerobot, from_minari, from_zarr, to_hdf5, to_lerobot, to_minari, to_zarr
from relive.datasets.files import compute_memory_limit
from tests.datasets.guarded import peak
from tests.datasets.test_damaged_datasets import READERS, SAMPLES, copy_damaged
from tests.faults.processes import apart
from tests.tiers import select
from tests.totals import SEED, tell, trials

h5py = pytest.importorskip("h5py", reason='needs HDF5: pip install ".[hdf5]"')
numcodecs = pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')
pyarrow = pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')
parquet = pytest.importorskip("pyarrow.parquet", reason='needs pyarrow: pip install ".[lerobot]"')
pytest.importorskip("minari", reason='needs Minari: pip install ".[minari]"')
pytest.importorskip("av", reason='needs PyAV: pip install ".[lerobot]"')

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs")

READ = {".hdf5": from_hdf5, ".zarr": from_zarr, ".zip": from_zarr, ".lerobot": from_lerobot, ".minari": from_minari}


def steps(count: int = 4) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(2 * count, 2, 1, seed=0)
    for t in range(count):
        replay.add([t, t], [0.0], float(t), t == count - 1, False, [t + 1, t + 1])
    return replay


def count_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


# Each function makes a forged dataset in a folder; it returns the path and further arguments for the reader.


def small_store(folder: Path, name: str = "s.zarr") -> Path:
    to_zarr(steps(), folder / name)
    return folder / name


def change_metadata(store: Path, array: str, **changes: Any) -> None:
    file = store / "data" / array / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def unbounded_chunks(folder: Path) -> tuple[Path, dict[str, Any]]:
    store = small_store(folder)
    (store / "data/obs/0.0").unlink()
    change_metadata(store, "obs", chunks=[100_000_000, 2])
    return store, {}


def chunk_of_zeros(folder: Path) -> tuple[Path, dict[str, Any]]:
    store, rows = small_store(folder), 1 << 26
    body = numcodecs.Zstd(19).encode(np.zeros((rows, 2), np.float32))
    (store / "data/obs/0.0").write_bytes(body)
    change_metadata(store, "obs", chunks=[rows, 2], compressor={"id": "zstd"})
    return store, {}


def many_rows(folder: Path) -> tuple[Path, dict[str, Any]]:
    store, chunks = small_store(folder), 200
    rows = 1 << 20
    dtypes = {"obs": "<f4", "action": "<f4", "reward": "<f4", "terminated": "|b1", "truncated": "|b1"}
    for array, item in dtypes.items():
        wide = json.loads((store / "data" / array / ".zarray").read_text())["shape"][1:]
        body = bytes(numcodecs.Zstd(19).encode(np.zeros((rows, *wide), item)))
        for number in range(chunks):
            (store / "data" / array / ".".join(map(str, (number, *[0] * len(wide))))).write_bytes(body)
        change_metadata(store, array, shape=[rows * chunks, *wide], chunks=[rows, *wide], compressor={"id": "zstd"})
    (store / "meta/episode_ends/0").write_bytes(np.array([rows * chunks], np.int64).tobytes())
    ends = json.loads((store / "meta/episode_ends/.zarray").read_text())
    (store / "meta/episode_ends/.zarray").write_text(json.dumps(ends | {"compressor": None, "chunks": [1]}))
    return store, {}


def zip_with_false_size(folder: Path) -> tuple[Path, dict[str, Any]]:
    small_store(folder, "s.zip")
    path, body = folder / "s.zip", bytes(1 << 29)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(folder / "t.zip", "w") as new:
        for entry in old.namelist():
            new.writestr(entry, body if entry == "data/obs/0.0" else old.read(entry), zipfile.ZIP_DEFLATED)
    forged = (folder / "t.zip").read_bytes()
    (folder / "t.zip").write_bytes(forged.replace((1 << 29).to_bytes(4, "little"), (100).to_bytes(4, "little")))
    return folder / "t.zip", {}


def zip_of_bzip2(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "s.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as new:
        new.writestr("data/obs/.zarray", bytes(1 << 26))
    return path, {}


def file_with(folder: Path, layout: Any, name: str, make: Callable[[Any, str], Any]) -> tuple[Path, dict[str, Any]]:
    """Write an HDF5 file in which `make(file, name)` makes the array `name` anew."""
    to_hdf5(steps(), folder / "f.hdf5", layout=layout)
    with h5py.File(folder / "f.hdf5", "a") as file:
        del file[name]
        make(file, name)
    return folder / "f.hdf5", {}


def array_of(layout: str, name: str, value: Any) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    return lambda folder: file_with(folder, layout, name, lambda file, name: file.__setitem__(name, value))


def swelling(dtype: Any, length: int) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    """Forge a file of four rewards whose only chunk, of `length` numbers, inflates to 1 GiB."""

    def make(file: Any, name: str) -> None:
        data = file.create_dataset(name, (4,), dtype, chunks=(length,), maxshape=(None,), compression="gzip")
        press = zlib.compressobj(9)
        body = b"".join(press.compress(bytes(1 << 24)) for _ in range(64)) + press.flush()
        data.id.write_direct_chunk((0,), body)

    return lambda folder: file_with(folder, "robomimic", "data/demo_0/rewards", make)


def scale_offset(folder: Path) -> tuple[Path, dict[str, Any]]:
    def make(file: Any, name: str) -> None:
        file.create_dataset(name, data=np.arange(4), chunks=(4,), scaleoffset=0)

    return file_with(folder, "robomimic", "data/demo_0/rewards", make)


def share_text(path: Path, name: str, rows: int = 20_000) -> None:
    """Add an array of texts to an HDF5 file that all refer to the same megabyte."""
    with h5py.File(path, "a") as file:
        texts = file.create_dataset(name, (rows,), h5py.string_dtype())
        texts[0] = "x" * 1_000_000
        texts[1:] = "y"
        offset = texts.id.get_offset()
    body = bytearray(path.read_bytes())
    body[offset : offset + 16 * rows] = bytes(body[offset : offset + 16]) * rows
    path.write_bytes(body)


def shared_text(folder: Path) -> tuple[Path, dict[str, Any]]:
    with h5py.File(folder / "f.hdf5", "w") as file:
        file["data/demo_0/obs/x"] = file["data/demo_0/actions"] = np.zeros((20_000, 1), np.float32)
    share_text(folder / "f.hdf5", "data/demo_0/text")
    return folder / "f.hdf5", {"encode": {"text": len}, "final_obs": "drop"}


def many_flags(folder: Path) -> tuple[Path, dict[str, Any]]:
    rows = 200_000_000
    with h5py.File(folder / "f.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
            data = file.create_dataset(name, (rows,), np.uint8, chunks=(rows // 50,), compression="gzip")
            body = zlib.compress(bytes(rows // 50))
            for start in range(0, rows, rows // 50):
                data.id.write_direct_chunk((start,), body)
    return folder / "f.hdf5", {}


def frames(
    folder: Path, values: Callable[[int], Any], rows: int, feature: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Make a dataset of `rows` frames whose column "action" is `values(rows)`."""
    path = folder / "d.lerobot"
    to_lerobot(steps(), path, fps=10)
    info = json.loads((path / "meta/info.json").read_text())
    numbers = {"dtype": "int64", "shape": [1], "names": None}
    info["features"] = {"observation.state": numbers, "action": feature, "episode_index": numbers}
    (path / "meta/info.json").write_text(json.dumps(info))
    (path / "meta/final_obs.parquet").unlink()
    zeros = pyarrow.array(np.zeros(rows, np.int64))
    table = pyarrow.table({"observation.state": zeros, "action": values(rows), "episode_index": zeros})
    parquet.write_table(table, path / "data/chunk-000/file-000.parquet", compression="zstd")
    return path, {}


def shared_picture(folder: Path) -> tuple[Path, dict[str, Any]]:
    body = (b"\x89PNG" + np.random.default_rng(0).bytes(500_000)).ljust(1_000_000, b"x")

    def values(rows: int) -> Any:
        bodies = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pyarrow.array([body], pyarrow.binary()))
        return pyarrow.StructArray.from_arrays([bodies, pyarrow.nulls(rows, pyarrow.string())], ["bytes", "path"])

    return frames(folder, values, 20_000, {"dtype": "image", "shape": [8, 8, 3], "names": None})


def one_long_list(folder: Path) -> tuple[Path, dict[str, Any]]:
    def values(rows: int) -> Any:
        offsets = np.full(rows + 1, 1 << 26, np.int32)
        offsets[0] = 0
        return pyarrow.ListArray.from_arrays(offsets, np.zeros(1 << 26, np.float32))

    return frames(folder, values, 1000, {"dtype": "float32", "shape": [4], "names": None})


def endless_frames(folder: Path) -> tuple[Path, dict[str, Any]]:
    numbers = {"dtype": "int64", "shape": [1], "names": None}
    return frames(folder, lambda rows: pyarrow.array(np.zeros(rows, np.int64)), 12_000_000, numbers)


def times(folder: Path) -> tuple[Path, dict[str, Any]]:
    numbers = {"dtype": "int64", "shape": [1], "names": None}
    return frames(folder, lambda rows: pyarrow.array(np.zeros(rows, np.int64)).cast(pyarrow.time64("us")), 4, numbers)


def minari_dataset(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        to_minari(steps(), "d-v0")
    (folder / "d-v0/data").rename(folder / "d.minari")
    return folder / "d.minari"


def metadata(path: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    file = path / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path, {}


def huge_step_count(folder: Path) -> tuple[Path, dict[str, Any]]:
    return metadata(minari_dataset(folder), total_steps=1 << 33)


def huge_space(folder: Path) -> tuple[Path, dict[str, Any]]:
    space = {"type": "Box", "dtype": "float32", "shape": [1 << 29], "low": 0.0, "high": 1.0}
    return metadata(minari_dataset(folder), observation_space=json.dumps(space))


def shared_info(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = minari_dataset(folder)
    share_text(path / "main_data.hdf5", "episode_0/infos/text")
    return path, {"infos": ()}


FORGERIES: dict[str, tuple[Callable[[Path], tuple[Path, dict[str, Any]]], str]] = {
    "chunks without bound": (unbounded_chunks, "data/obs: expected chunks of at most"),
    "a chunk of zeros": (chunk_of_zeros, "data/obs: expected chunks of at most"),
    "rows without end": (many_rows, "expected steps of at most"),
    "a zip with a false size": (zip_with_false_size, "data/obs/0.0: expected a file that can be read"),
    "a zip of bzip2": (zip_of_bzip2, "expected an entry that is stored or deflated"),
    "a text for all": (shared_text, "text: expected texts of their own"),
    "a chunk that swells": (swelling(np.float32, 4), "rewards: chunk .* expected at most 16 bytes"),
    "a huge chunk of HDF5": (swelling(np.float64, 1 << 27), "rewards: expected chunks of at most"),
    "a filter of HDF5": (scale_offset, "rewards: expected at most one of the filters gzip and lzf"),
    "flags without end": (many_flags, "rewards: expected fewer steps"),
    "rewards that are one number": (array_of("d4rl", "rewards", 1.0), "rewards: expected an axis of"),
    "rewards that are empty": (
        array_of("d4rl", "rewards", h5py.Empty(np.float32)),
        "rewards: expected an axis of",
    ),
    "actions that are one number": (
        array_of("robomimic", "data/demo_0/actions", 1.0),
        "actions: expected an axis of",
    ),
    "a picture for all": (shared_picture, "action: expected a PNG or JPEG"),
    "one long list": (one_long_list, "expected pages and lists of at most"),
    "frames without end": (endless_frames, "expected steps of at most"),
    "times as numbers": (times, "action: expected (int64|numbers)"),
    "a huge number of steps": (huge_step_count, "expected steps of at most"),
    "a space without bound": (huge_space, "observation_space: shape: expected at most"),
    "an info for all": (shared_info, "text: expected texts of their own"),
}
QUICK = (
    "chunks without bound", "a text for all", "a chunk that swells", "rewards that are one number", "times as numbers",
)  # fmt: skip


def forge_all(names: list[str], folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    actual = {}
    for name in names:
        (folder / name).mkdir()
        actual[name] = FORGERIES[name][0](folder / name)
    return actual


def measure_costs(datasets: dict[str, tuple[Path, dict[str, Any]]]) -> dict[str, tuple[str, str, int]]:
    """Read datasets; return for each the error, its message, and the growth of this process in bytes."""
    import_readers()
    return {name: measure_cost(*dataset) for name, dataset in datasets.items()}


def measure_cost(path: Path, options: dict[str, Any]) -> tuple[str, str, int]:
    def read() -> tuple[str, str, int]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                buffer = READ[path.suffix](path, **options)
            except Exception as error:
                return type(error).__name__, str(error), 0
        return "read", "", buffer.nbytes

    (outcome, message, buffer_bytes), growth = peak(read)
    return outcome, message, growth - buffer_bytes


def import_readers() -> None:
    """Import the libraries of all readers, whose memory does not count."""
    for name, read in READERS.items():
        read(SAMPLES / name)


@pytest.mark.parametrize("part", select("some", of=["some", "all"]))
def test_small_datasets_that_would_need_much_memory_are_refused(part: str, tmp_path: Path) -> None:
    datasets = apart(forge_all, list(QUICK if part == "some" else FORGERIES), tmp_path)
    for name, (outcome, message, growth) in apart(measure_costs, datasets, timeout=600).items():
        nbytes = count_bytes(datasets[name][0])
        tell(f"C12: {name}: {nbytes:,} bytes, {outcome}, {growth >> 20} MiB")
        assert outcome == "SchemaError", (name, outcome, message)
        assert re.search(FORGERIES[name][1], message), (name, message)
        assert growth <= compute_memory_limit(nbytes), name


def measure_damaged_copies(name: str, count: int, seed: int, folder: Path) -> tuple[int, int]:
    """Read damaged copies; return the number of refusals, and the largest excess over the budget in bytes."""
    import_readers()
    refused, most = 0, -(1 << 62)
    for trial in range(count):
        target = folder / name
        copy_damaged(SAMPLES / name, target, random.Random(f"{name} {seed} {trial}"))

        def read(target: Path = target) -> int:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    READERS[name](target).check()
                except rl.SchemaError:
                    return 1
            return 0

        was_refused, grown = peak(read)
        refused, most = refused + was_refused, max(most, grown - compute_memory_limit(count_bytes(target)))
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    return refused, most


@pytest.mark.parametrize("name", select("d4rl.hdf5", "diffusion_policy.zarr", of=READERS))
def test_damaged_datasets_take_little_memory(name: str, tmp_path: Path) -> None:
    assert_within_budget(name, trials("C12_DAMAGE", 20), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_datasets_take_little_memory(name: str, tmp_path: Path) -> None:
    assert_within_budget(name, trials("C12_DAMAGE_LONG", 2_000), tmp_path)


def assert_within_budget(name: str, count: int, folder: Path) -> None:
    refused, most = apart(measure_damaged_copies, name, count, SEED, folder, timeout=7200)
    tell(f"C12: {name}: {count} damaged, {refused} refused, at least {-most >> 20} MiB below the budget, seed {SEED}")
    assert most <= 0
