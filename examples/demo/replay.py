"""The memory of an Atari transition in a replay buffer, and the time of a batch, for every installed library."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from relive_conformance.adapters import Replay, ReplayShape, Transitions, discover

SHAPE = ReplayShape(capacity=2_000, num_envs=1, obs=(84, 84, 4), action_dim=1, dtype=np.uint8)
EPISODE, BATCH, DRAWS = 200, 32, 40


@dataclass(frozen=True)
class Line:
    """One library: bytes per transition (None if it hides them), and microseconds per batch."""

    name: str
    version: str
    is_ours: bool
    bytes_each: float | None
    batch_us: float


def measure(shape: ReplayShape = SHAPE) -> Iterator[Line]:
    """Fill a buffer of every installed library and sample from it: ours first, also with stacked frames."""
    blocks = list(_experience(shape))
    for library in discover().adapters:
        is_ours = library.name == "relive"
        makers = {"": library.replay} if library.replay is not None else {}
        makers |= {f" ({name})": make for name, make in library.replay_saving.items()} if is_ours else {}
        for suffix, make in makers.items():
            try:
                replay = make(shape)
                for block in blocks:
                    replay.fill(block)
            # A library that refuses the data is left out of the table.
            except Exception:
                continue
            each = None if replay.nbytes is None else replay.nbytes / replay.stored
            yield Line(library.name + suffix, library.version, is_ours, each, _measure_batch_us(replay))


def show(console: Console, shape: ReplayShape = SHAPE) -> None:
    """Print the table, row by row while it is measured."""
    table = Table("library", "version")
    for heading in ("bytes per transition", f"batch of {BATCH}, µs"):
        table.add_column(heading, justify="right")
    with Live(table, console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        for line in measure(shape):
            each = "hidden" if line.bytes_each is None else f"{line.bytes_each:,.0f}"
            table.add_row(line.name, line.version, each, f"{line.batch_us:,.0f}", style="green" if line.is_ours else "")
            if live is not None:
                live.refresh()
    if not console.is_terminal:
        console.print(table)
    height, width, _ = shape.obs
    console.print(
        f"Every observation is kept once; rl.Stacked keeps frames of {height} · {width} = {height * width:,} bytes."
    )


def _experience(shape: ReplayShape) -> Iterator[Transitions]:
    """Yield episodes of random frames, which cannot be compressed."""
    random = np.random.default_rng(0)
    k = shape.obs[-1]
    for _ in range(shape.capacity // EPISODE):
        frames = random.integers(0, 255, (EPISODE + 1, *shape.obs[:2]), dtype=np.uint8)
        padded = np.concatenate([np.repeat(frames[:1], k - 1, 0), frames])
        stacks = np.stack([padded[j : j + EPISODE + 1] for j in range(k)], -1)
        ends = np.arange(EPISODE) == EPISODE - 1
        yield Transitions(
            obs=np.ascontiguousarray(stacks[:-1]),
            action=np.zeros((EPISODE, shape.action_dim), np.float32),
            reward=np.ones(EPISODE, np.float32),
            terminated=ends,
            truncated=np.zeros(EPISODE, bool),
            next_obs=np.ascontiguousarray(stacks[1:]),
        )


def _measure_batch_us(replay: Replay) -> float:
    seconds: list[float] = []
    with torch.random.fork_rng(devices=[]):  # some libraries draw from torch's global generator
        for _ in range(DRAWS):
            start = time.perf_counter()
            replay.sample(BATCH)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6
