# pyright: reportMissingImports=false
"""Fill and sample replay memory that does not fit into RAM, beside RAM and beside TorchRL's memory-mapped storage.

Run it as `python -m benchmarks.disk [--gib 4] [--limit-gib 1] [--folder PATH] [--json PATH]`. Every contestant runs in
a process of its own: with so little memory, page cache included, and again with as much as there is (cached). TorchRL
is left out where it is not installed. A transition is two frames of 84 × 84 bytes, an action, a reward and the flags.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import recollect as rc
from benchmarks import machine
from benchmarks.limit import limited
from benchmarks.report import write_json
from benchmarks.suite import RESULTS, describe, file_name
from recollect.conformance.peers import Discovery

FRAME = 84 * 84
BLOCK = 512
BATCHES = (32, 256)


@dataclass(frozen=True)
class Figures:
    """What one contestant did."""

    contestant: str
    transitions: int
    stored_gib: float
    limit_gib: float | None
    peak_gib: float | None
    """Of memory in use, page cache included."""
    fill: float
    """Transitions a second, into new memory."""
    refill: float
    """The same over rows that are there already, and long out of memory."""
    sample: dict[int, float]
    """Transitions a second, by batch size."""
    wrong: int
    """Sampled transitions that are not what was added."""


def blocks(start: int, count: int) -> Iterator[dict[str, Any]]:
    """Steps of one long episode; a frame is noise, and begins with the number of its step."""
    noise = np.random.default_rng(0).integers(0, 256, (BLOCK + 1, FRAME), dtype=np.uint8)
    for first in range(start, start + count, BLOCK):
        frames = noise.copy()
        frames[:, :8] = np.arange(first, first + BLOCK + 1)[:, None].view(np.uint8)
        flags = np.zeros(BLOCK, bool)
        yield {
            "obs": frames[:-1].reshape(BLOCK, 84, 84),
            "action": np.arange(first, first + BLOCK),
            "reward": np.zeros(BLOCK, np.float32),
            "terminated": flags,
            "truncated": flags.copy(),
            "next_obs": frames[1:].copy().reshape(BLOCK, 84, 84),
        }


def measure(
    extend: Callable[[dict[str, Any]], object], sample: Callable[[int], tuple[Any, Any, Any]], count: int
) -> dict[str, Any]:
    """Fill twice, then sample; `sample` gives frames, actions and next frames."""
    rates = []
    for lap in range(2):
        seconds = 0.0
        for block in blocks(lap * count, count):
            start = perf_counter()
            extend(block)
            seconds += perf_counter() - start
        rates.append(count / seconds)
    drawn, wrong = {}, 0
    for size in BATCHES:
        for _ in range(3):
            sample(size)
        done, start = 0, perf_counter()
        while perf_counter() - start < 5:
            sample(size)
            done += size
        drawn[size] = done / (perf_counter() - start)
        obs, action, following = sample(size)
        for frame, number in ((obs, action), (following, action + 1)):
            found = np.ascontiguousarray(frame.reshape(size, -1)[:, :8].numpy()).view(np.int64)[:, 0]
            wrong += int((found != number.numpy()).sum())
    return {"fill": rates[0], "refill": rates[1], "sample": drawn, "wrong": wrong}


def run_recollect(count: int, folder: str | None) -> tuple[float, dict[str, Any]]:
    """Ours: every frame is stored once."""
    device = "cpu" if folder is None else rc.Memory.disk(folder)
    obs = rc.Field((84, 84), torch.uint8)
    with rc.ReplayBuffer(count, obs, rc.Field((), torch.int64), device=device, seed=0) as replay:

        def sample(size: int) -> tuple[Any, Any, Any]:
            batch = replay.sample(size)
            return batch["obs"], batch["action"], batch["next_obs"]

        return replay.nbytes / 2**30, measure(replay.extend, sample, count)


def run_torchrl(count: int, folder: str | None) -> tuple[float, dict[str, Any]]:
    """TorchRL: a TensorDict of memory-mapped tensors."""
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    storage = LazyMemmapStorage(count, scratch_dir=folder)
    replay = TensorDictReplayBuffer(storage=storage)

    def extend(block: dict[str, Any]) -> None:
        names = ("reward", "terminated", "truncated")
        found = {name: torch.from_numpy(block[name]) for name in ("obs", "action")}
        following = {name: torch.from_numpy(block[name]) for name in names} | {
            "obs": torch.from_numpy(block["next_obs"])
        }
        replay.extend(TensorDict({**found, "next": TensorDict(following, [BLOCK])}, [BLOCK]))

    def sample(size: int) -> tuple[Any, Any, Any]:
        batch = replay.sample(size)
        return batch["obs"], batch["action"], batch["next", "obs"]

    return count * (2 * FRAME + 14) / 2**30, measure(extend, sample, count)


@dataclass(frozen=True)
class Contestant:
    """Who runs, where."""

    run: Callable[[int, str | None], tuple[float, dict[str, Any]]]
    in_folder: bool = True
    is_limited: bool = True
    """With less memory than it has data."""


CONTESTANTS = {
    "recollect, disk": Contestant(run_recollect),
    "TorchRL, memmap": Contestant(run_torchrl),
    "recollect, disk, cached": Contestant(run_recollect, is_limited=False),
    "TorchRL, memmap, cached": Contestant(run_torchrl, is_limited=False),
    "recollect, RAM": Contestant(run_recollect, in_folder=False, is_limited=False),
}


def run(name: str, count: int, folder: str, limit: float) -> Figures:
    """One contestant, in this process."""
    torch.set_num_threads(1)
    who = CONTESTANTS[name]
    with limited(int(limit * 2**30)) if who.is_limited else nullcontext() as group:
        stored, figures = who.run(count, folder if who.in_folder else None)
        peak = None if group is None else group.peak_bytes / 2**30
    return Figures(name, count, stored, None if group is None else limit, peak, **figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print a table, write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="of frames that recollect stores")
    parser.add_argument("--limit-gib", type=float, default=1.0, help="of memory for those that store in a folder")
    parser.add_argument("--folder", type=Path, help="on which disk (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    console, count = Console(width=120), int(options.gib * 2**30) // FRAME // BLOCK * BLOCK
    done: list[Figures] = []
    with TemporaryDirectory(dir=options.folder) as root:
        for name in CONTESTANTS:
            folder = Path(root) / "memory"
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                try:
                    done.append(pool.submit(run, name, count, str(folder), options.limit_gib).result())
                except ImportError as error:
                    console.print(f"[yellow]missing[/yellow] {name}: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    _print(done, console)
    about = describe("disk", Discovery([], []), quick=False)
    about["peers"] = {name: machine._version(name) for name in ("recollect", "torchrl")}
    path = options.json or RESULTS / file_name("disk", about)
    write_json(path, [], {**about, "figures": [asdict(figures) for figures in done]})
    console.print(f"written to {path}")
    return 0


def _print(done: list[Figures], console: Console) -> None:
    table = Table("contestant", "stored", "memory", "fill", "refill", *(f"sample {size}" for size in BATCHES), "wrong")
    for one in done:
        memory = "no limit" if one.limit_gib is None else f"{one.peak_gib:.2f} of {one.limit_gib:g} GiB"
        rates = (one.fill, one.refill, *one.sample.values())
        table.add_row(
            one.contestant, f"{one.stored_gib:.1f} GiB", memory, *(f"{rate:,.0f}/s" for rate in rates), str(one.wrong)
        )
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
