"""Private memory: pages are allocated as rows are written, and a buffer that cannot fit is refused at once."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.storage import allocator

FRAME = rl.Field((84, 84), torch.uint8)

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is resident")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@linux
@pytest.mark.parametrize("num_envs", [None, 8])
@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()], ids=repr)
def test_a_new_buffer_of_a_million_frames_takes_address_space_only(sampler: Any, num_envs: int | None) -> None:
    before = resident_bytes()
    replay = rl.ReplayBuffer(10**6, obs=FRAME, action=(), num_envs=num_envs, sampler=sampler)
    assert replay.nbytes > 7 * 10**9
    assert resident_bytes() - before < 50 * 10**6


@linux
def test_rows_take_pages_when_they_are_written() -> None:
    replay = rl.ReplayBuffer(10**6, obs=FRAME, action=(), seed=0)
    before = resident_bytes()
    block = {
        "obs": np.ones((3000, 84, 84), np.uint8), "next_obs": np.ones((3000, 84, 84), np.uint8),
        "action": np.ones(3000, np.float32), "reward": np.ones(3000, np.float32),
        "terminated": np.zeros(3000, bool), "truncated": np.zeros(3000, bool),
    }  # fmt: skip
    allocated = resident_bytes() - before
    replay.extend(block)
    grown = resident_bytes() - before - allocated
    assert 3000 * 7056 * 0.9 < grown < 2 * 3000 * 7056


@linux
def test_a_buffer_that_does_not_fit_beside_the_pages_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 10**6
    first = rl.ReplayBuffer(rows, obs=FRAME, action=())
    free = int(1.5 * first.nbytes)
    monkeypatch.setattr("relive.storage.allocator.available_host_bytes", lambda: free)
    with pytest.raises(MemoryError, match="capacity: expected at most .* GiB, the free memory of this machine"):
        rl.ReplayBuffer(rows, obs=FRAME, action=())
    del first
    gc.collect()
    rl.ReplayBuffer(rows, obs=FRAME, action=())


@linux
def test_arrays_that_are_gone_are_not_counted() -> None:
    gc.collect()
    before = allocator.unwritten_bytes()
    array = allocator.allocate_zeros((1 << 33,), torch.uint8)
    assert allocator.unwritten_bytes() > before
    del array
    assert allocator.unwritten_bytes() == before
