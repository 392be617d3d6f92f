# pyright: reportMissingImports=false
"""Fill and sample replay memory that does not fit into RAM, beside RAM and beside TorchRL's memory-mapped storage.

Run it as `python -m benchmarks.disk [--quick] [--gib 4] [--limit-gib 1] [--folder PATH] [--json PATH]`. Every
contestant runs in a new process: with a memory limit, which counts the page cache too, and without a limit ("cached").
TorchRL is skipped if it is not installed. A transition is two frames of 84 × 84 bytes, an action, a reward and flags.
"""

from __future__ import annotations

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

import relive as rl

from . import machine
from .limit import limit_memory
from .report import Result
from .suite import Session, make_parser
from .timing import Role, make_timing

FRAME = 84 * 84
BLOCK = 512
BATCHES = (32, 256)


PIECES = 8
"""Number of repetitions of each measurement."""


@dataclass(frozen=True)
class Figures:
    """The figures of one contestant."""

    contestant: str
    transitions: int
    stored_gib: float
    limit_gib: float | None
    peak_gib: float | None
    """Peak memory in GiB, page cache included."""
    seconds: dict[str, list[float]]
    """Seconds per transition in each repetition, by operation: fill new memory, refill old rows, sample."""
    wrong: int
    """Number of sampled transitions that differ from the added ones."""


def blocks(start: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield steps of one long episode; each frame is noise that begins with the step number."""
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
    """Fill twice, then sample; `sample` returns frames, actions and next frames."""
    seconds: dict[str, list[float]] = {}
    for lap, name in enumerate(("fill", "refill")):
        block_seconds = []
        for block in blocks(lap * count, count):
            start = perf_counter()
            extend(block)
            block_seconds.append((perf_counter() - start) / BLOCK)
        seconds[name] = [float(np.mean(piece)) for piece in np.array_split(block_seconds, PIECES) if len(piece)]
    wrong = 0
    for size in BATCHES:
        for _ in range(3):
            sample(size)
        seconds[f"sample {size}"] = [_measure_seconds_per_row(sample, size) for _ in range(PIECES)]
        obs, action, following = sample(size)
        for frame, number in ((obs, action), (following, action + 1)):
            found = np.ascontiguousarray(frame.reshape(size, -1)[:, :8].numpy()).view(np.int64)[:, 0]
            wrong += int((found != number.numpy()).sum())
    return {"seconds": seconds, "wrong": wrong}


def _measure_seconds_per_row(sample: Callable[[int], object], size: int) -> float:
    rows, start = 0, perf_counter()
    while perf_counter() - start < 0.5:
        sample(size)
        rows += size
    return (perf_counter() - start) / rows


def run_relive(count: int, folder: str | None) -> tuple[float, dict[str, Any]]:
    """relive: every frame is stored once."""
    device = "cpu" if folder is None else rl.Memory.disk(folder)
    obs = rl.Field((84, 84), torch.uint8)
    with rl.ReplayBuffer(count, obs, rl.Field((), torch.int64), device=device, seed=0) as replay:

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
    """A contestant and its memory limit."""

    run: Callable[[int, str | None], tuple[float, dict[str, Any]]]
    in_folder: bool = True
    is_limited: bool = True
    """Whether the contestant has less memory than data."""


CONTESTANTS = {
    "relive, disk": Contestant(run_relive),
    "TorchRL, memmap": Contestant(run_torchrl),
    "relive, disk, cached": Contestant(run_relive, is_limited=False),
    "TorchRL, memmap, cached": Contestant(run_torchrl, is_limited=False),
    "relive, RAM": Contestant(run_relive, in_folder=False, is_limited=False),
}


def run(name: str, count: int, folder: str, limit: float) -> Figures:
    """Run one contestant in this process."""
    torch.set_num_threads(1)
    contestant = CONTESTANTS[name]
    with limit_memory(int(limit * 2**30)) if contestant.is_limited and limit else nullcontext() as group:
        stored, figures = contestant.run(count, folder if contestant.in_folder else None)
        peak = None if group is None else group.peak_bytes / 2**30
    return Figures(name, count, stored, None if group is None else limit, peak, **figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all contestants, print a table, write the file."""
    parser = make_parser("disk", __doc__ or "")
    parser.add_argument("--gib", type=float, help="of frames that relive stores (default: 4, quick 0.25)")
    parser.add_argument("--limit-gib", type=float, help="of memory for those that store in a folder (default: 1)")
    parser.add_argument("--folder", type=Path, help="on which disk (default: the system's temporary folder)")
    options = parser.parse_args(arguments)
    session = Session.create("disk", options)
    session.about["peers"] = {name: machine.installed_version(name) for name in ("relive", "torchrl")}
    limit = options.limit_gib or (0.0 if options.quick else 1.0)  # so little data fits in any memory
    count = int((options.gib or (0.25 if options.quick else 4.0)) * 2**30) // FRAME // BLOCK * BLOCK
    done: list[Figures] = []
    with TemporaryDirectory(dir=options.folder) as root:
        for name in CONTESTANTS:
            folder = Path(root) / "memory"
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                try:
                    done.append(pool.submit(run, name, count, str(folder), limit).result())
                except (ImportError, OSError) as error:
                    session.console.print(f"[yellow]missing[/yellow] {name}: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    return session.finish(
        [session.compare(result) for result in make_results(done)], figures=[asdict(one) for one in done]
    )


def make_results(done: list[Figures]) -> list[Result]:
    """Return a case per operation, with little and with enough memory; RAM is the physical limit."""
    results = []
    for kind, figures in (("with little memory", [f for f in done if f.limit_gib]), ("cached", _cached(done))):
        for action in ("fill", "refill", *(f"sample {size}" for size in BATCHES)) if figures else ():
            result = Result(f"disk {kind}: {action}", [])
            for one in figures:
                seconds, name = one.seconds[action], one.contestant.removesuffix(", cached")
                if one.wrong:
                    result.refused[name] = f"{one.wrong} sampled transitions were never added"
                else:
                    result.timings.append(make_timing(name, _role(name), seconds))
            results.append(result)
    return results


def _cached(done: list[Figures]) -> list[Figures]:
    return [one for one in done if one.contestant.endswith(("cached", "RAM"))]


def _role(name: str) -> Role:
    if name.endswith("RAM"):
        return "limit"
    return "ours" if name.startswith("relive") else "peer"


if __name__ == "__main__":
    raise SystemExit(main())
