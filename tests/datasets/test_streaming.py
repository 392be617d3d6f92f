"""A dataset is read in blocks: the memory that a reader takes does not grow with the file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.datasets import from_hdf5, from_lerobot, from_zarr, to_hdf5, to_lerobot, to_zarr

pytest.importorskip("h5py", reason='needs HDF5: pip install ".[hdf5]"')
pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')
pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')

FORMATS: dict[str, tuple[Any, Any]] = {
    "f.hdf5": (to_hdf5, from_hdf5),
    "d4rl.hdf5": (lambda replay, path: to_hdf5(replay, path, layout="d4rl"), from_hdf5),
    "s.zarr": (to_zarr, from_zarr),
    "set": (lambda replay, path: to_lerobot(replay, path, fps=10), from_lerobot),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMATS)
def test_the_memory_of_a_reader_is_bounded(name: str, tmp_path: Path) -> None:
    write, read = FORMATS[name]
    steps, shape = 20_000, (100, 100)
    declared = {"obs": rl.Field(shape, torch.uint8), "action": 1}
    with rl.ReplayBuffer(2 * steps, **declared, device=rl.Memory.disk(tmp_path / "a")) as replay:
        rows = np.arange(1001)[:, None, None]
        frames = np.broadcast_to(rows % 256, (1001, *shape)).astype(np.uint8)
        flags = np.zeros(1000, bool)
        for _ in range(steps // 1000):
            batch = {"obs": frames[:-1], "next_obs": frames[1:], "action": np.zeros((1000, 1)), "reward": flags}
            replay.extend(batch | {"terminated": flags, "truncated": np.arange(1000) == 999})
        write(replay, tmp_path / name)
    columns = {"task_index": None} if name == "set" else None
    with rl.ReplayBuffer(2 * steps, **declared, device=rl.Memory.disk(tmp_path / "b")) as other:
        tracemalloc.start()
        read(tmp_path / name, other, columns=columns)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(other) == steps
        assert int(other[other.ids()[-1:]]["next_obs"].max()) == 1000 % 256
    assert peak < 32 << 20 < steps * 100 * 100, f"{peak:,} bytes"
