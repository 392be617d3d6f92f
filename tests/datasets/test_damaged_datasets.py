"""Datasets with changed or missing bytes: read, or refused with an error that names the file."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import pytest

import relive as rl
from relive.datasets import from_hdf5, from_lerobot, from_zarr
from tests.tiers import select

pytest.importorskip("h5py", reason='needs HDF5: pip install ".[hdf5]"')
pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')
pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')

SAMPLES = Path(__file__).parent / "samples"
READERS = {
    "d4rl.hdf5": from_hdf5, "robomimic.hdf5": from_hdf5, "diffusion_policy.zarr": from_zarr,
    "diffusion_policy.zarr.zip": from_zarr, "lerobot": from_lerobot,
}  # fmt: skip


def copy_damaged(source: Path, target: Path, rng: random.Random) -> None:
    """Copy a dataset, and change or cut off some bytes of one file."""
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    files = sorted(file for file in target.rglob("*") if file.is_file()) if target.is_dir() else [target]
    file = rng.choice([file for file in files if file.name != "stats.json"])
    body = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(body) or 1)
        kind = rng.randrange(4)
        if kind == 0:
            body[at : at + 1] = bytes([rng.choice([0, 255, 127, 128, ord("9"), ord("-")])])
        elif kind == 1:
            body[at : at + 8] = rng.randbytes(8)
        elif kind == 2:
            del body[at:]
        elif body:
            body[at] ^= 1 << rng.randrange(8)
    file.write_bytes(body)


@pytest.mark.parametrize("count", select(6, of=[6, 300]))
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name: str, count: int, tmp_path: Path) -> None:
    if name == "lerobot":
        pytest.importorskip("av", reason='needs PyAV: pip install ".[lerobot]"')
    refused = 0
    for seed in range(count):
        target = tmp_path / str(seed) / name
        target.parent.mkdir()
        copy_damaged(SAMPLES / name, target, random.Random(seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                READERS[name](target).check()
            except rl.SchemaError:
                refused += 1
        shutil.rmtree(target.parent)
    assert refused
    # All copies of a small number may be unreadable.
    assert refused < count or count < 50
