"""A dataset is read in blocks: the memory that a reader takes does not grow with the file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import relive as rl
from tests.datasets.formats import FORMATS


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "minari-v0"])
def test_the_memory_of_a_reader_is_bounded(name: str, tmp_path: Path) -> None:
    steps, shape = 20_000, (100, 100)
    declared = {"obs": rl.Field(shape, torch.uint8), "action": 1}
    with rl.ReplayBuffer(2 * steps, **declared, device=rl.Memory.disk(tmp_path / "a")) as replay:
        rows = np.arange(1001)[:, None, None]
        frames = np.broadcast_to(rows % 256, (1001, *shape)).astype(np.uint8)
        flags = np.zeros(1000, bool)
        for _ in range(steps // 1000):
            batch = {"obs": frames[:-1], "next_obs": frames[1:], "action": np.zeros((1000, 1)), "reward": flags}
            replay.extend(batch | {"terminated": flags, "truncated": np.arange(1000) == 999})
        FORMATS[name].write(replay, tmp_path / name)
    with rl.ReplayBuffer(2 * steps, **declared, device=rl.Memory.disk(tmp_path / "b")) as other:
        tracemalloc.start()
        FORMATS[name].read(tmp_path / name, other)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(other) == steps
        assert int(other[other.ids()[-1:]]["next_obs"].max()) == 1000 % 256
    assert peak < 32 << 20 < steps * 100 * 100, f"{peak:,} bytes"
