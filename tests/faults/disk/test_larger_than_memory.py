"""A disk buffer larger than the process's memory limit, page cache included, is filled and sampled."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

import relive as rl
from benchmarks.limit import limit_memory
from tests.faults.traffic import observation, read_tag
from tests.totals import tell

LIMIT, WIDTH, ROWS = 64 << 20, 1 << 15, 8192


def fill_and_sample(root: Path, told: Path) -> None:
    """Fill the ring twice in blocks, then verify every sampled row."""
    try:
        with (
            limit_memory(LIMIT) as group,
            rl.ReplayBuffer(
                ROWS, rl.Field(WIDTH, torch.uint8), rl.Field((), torch.int64), device=rl.Memory.disk(root), seed=0
            ) as replay,
        ):
            for first in range(0, 2 * ROWS, 64):
                obs = np.stack([observation(first + i, WIDTH) for i in range(65)])
                flags = np.zeros(64, bool)
                replay.extend(
                    {
                        "obs": obs[:-1], "action": np.arange(first, first + 64), "reward": np.zeros(64, np.float32),
                        "terminated": flags, "truncated": flags, "next_obs": obs[1:].copy(),
                    }
                )  # fmt: skip
            wrong = 0
            for _ in range(40):
                batch = replay.sample(64)
                tags = (
                    [read_tag(row) for row in batch["obs"].numpy()],
                    [read_tag(row) for row in batch["next_obs"].numpy()],
                )
                action = batch["action"].tolist()
                wrong += tags[0] != action or tags[1] != [number + 1 for number in action]
            told.write_text(f"{replay.nbytes} {group.peak_bytes} {wrong}")
    except OSError as error:
        told.write_text(f"not allowed: {error}")


@pytest.mark.thorough
def test_a_buffer_larger_than_memory_is_filled_and_sampled(tmp_path: Path) -> None:
    told = tmp_path / "told"
    process = multiprocessing.get_context("spawn").Process(target=fill_and_sample, args=(tmp_path / "memory", told))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    if told.read_text().startswith("not allowed"):
        pytest.skip(f"no control group of our own: {told.read_text()}")
    nbytes, peak, wrong = map(int, told.read_text().split())
    tell(f"disk memory: {nbytes >> 20} MiB in {peak >> 20} MiB of memory, {wrong} of 40 batches wrong")
    assert nbytes > 4 * LIMIT
    assert peak <= LIMIT
    assert wrong == 0
