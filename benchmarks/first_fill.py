"""Measure the cost of a new replay buffer, and of a step that is written to fresh pages.

Run it as `python -m benchmarks.first_fill [--rows 100000]`. A fresh `add` is compared with the same `add` on used pages
and with the bare page fault: the same bytes written with numpy into a new mapping of the same pages. Times are CPU
times of the thread, since a page fault does not wait; on a busy machine the clock would also measure other processes.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import relive as rl

FRAME = rl.Field((84, 84), torch.uint8)
ROUNDS = 5
PAGES = {"small pages": "MADV_NOHUGEPAGE", "pages of 2 MiB": "MADV_HUGEPAGE"}


class Cost(NamedTuple):
    """The cost of many equal steps, in µs of CPU time."""

    mean: float
    worst: float


def resident_bytes() -> int:
    """Return the number of bytes of this process in physical memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def construct(capacity: int, num_envs: int | None) -> tuple[float, int]:
    """Make a buffer of frames; return its milliseconds and its resident bytes."""
    before, start = resident_bytes(), time.perf_counter()
    replay = rl.ReplayBuffer(capacity, obs=FRAME, action=rl.Field((), torch.int64), num_envs=num_envs)
    seconds = time.perf_counter() - start
    return seconds * 1e3, resident_bytes() - before if replay is not None else 0


def measure_cost(step: Callable[[int], object], steps: int) -> Cost:
    """Return the mean and the largest cost of `steps` steps."""
    times = np.empty(steps)
    for i in range(steps):
        start = time.thread_time_ns()
        step(i)
        times[i] = time.thread_time_ns() - start
    return Cost(times.mean() / 1e3, times.max() / 1e3)


def fill_buffer(rows: int) -> tuple[Cost, Cost]:
    """Return the cost of `add` of one frame on fresh pages, and again on used pages."""
    replay = rl.ReplayBuffer(rows, obs=FRAME, action=rl.Field((), torch.int64), seed=0)
    frame = np.ones((84, 84), np.uint8)
    next_frame, action, reward = frame.copy(), np.int64(0), np.float32(0)

    def add(_: int) -> None:
        replay.add(frame, action, reward, False, False, next_frame)

    fresh = measure_cost(add, rows)
    return fresh, measure_cost(add, rows)


def fill_bare(rows: int, advice: str) -> tuple[Cost, Cost]:
    """Return the cost of writing the same bytes with numpy into a new mapping, and again into the used mapping."""
    memory = mmap.mmap(-1, rows * 7056, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(getattr(mmap, advice))
    frames, frame = np.frombuffer(memory, np.uint8).reshape(rows, 7056), np.ones(7056, np.uint8)

    def write(i: int) -> None:
        frames[i] = frame

    fresh = measure_cost(write, rows)
    return fresh, measure_cost(write, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_fill", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="frames that are written")
    rows = parser.parse_args(arguments).rows
    rl.ReplayBuffer(8, obs=1, action=1)  # late imports are not measured
    console = Console()
    construction = Table("1,000,000 frames 84×84", "ms", "MB resident", title="construction")
    for num_envs in (None, 8):
        milliseconds, nbytes = construct(10**6, num_envs)
        construction.add_row(f"num_envs={num_envs}", f"{milliseconds:.1f}", f"{nbytes / 1e6:.1f}")
    console.print(construction)
    first_fills = Table(
        "per frame",
        "fresh µs",
        "used µs",
        "fresh − used",
        "worst ms",
        title=f"first fill, {rows:,} frames, medians of {ROUNDS} rounds",
    )
    fills: dict[str, Callable[[], tuple[Cost, Cost]]] = {
        **{f"numpy, {name}": partial(fill_bare, rows, advice) for name, advice in PAGES.items()},
        "relive add": partial(fill_buffer, rows),
    }
    rounds = [{name: fill() for name, fill in fills.items()} for _ in range(ROUNDS)]
    for name in fills:
        means = [(fresh.mean, used.mean, fresh.mean - used.mean) for fresh, used in (one[name] for one in rounds)]
        fresh, used, extra = np.median(means, axis=0)
        worst = max(one[name][0].worst for one in rounds)
        first_fills.add_row(name, f"{fresh:.2f}", f"{used:.2f}", f"{extra:.2f}", f"{worst / 1e3:.2f}")
    console.print(first_fills)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
