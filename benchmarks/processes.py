"""Count what writers and samplers of one replay buffer get through at once, in threads, in processes and with peers.

Every writer owns an environment and adds its steps one by one; every sampler draws a prioritized batch and updates its
priorities. Run it as `python -m benchmarks.processes [--quick] [--json PATH]`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import recollect as rc
from benchmarks import machine
from benchmarks.report import write_rates
from benchmarks.suite import RESULTS, file_name
from recollect.samplers import Sampler

KINDS = {
    "obs(17)": {"obs": (17,), "dtype": np.float32, "capacity": 100_000, "batch": 256},
    "84x84x4": {"obs": (84, 84, 4), "dtype": np.uint8, "capacity": 4_000, "batch": 32},
}
CROWDS = [(1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (0, 4), (1, 1), (2, 2), (4, 4)]
"""Writers and samplers."""
MOST = 4
CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["recollect"])
BAR = 3.0


class Entrant(Protocol):
    """A library whose buffer several workers use at once."""

    name: str
    draws: str
    """How its samplers draw: only those that draw alike are compared."""

    def make(self, kind: str) -> Any:
        """A buffer that is full, as workers get it."""
        ...

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        """In a worker: what adds one step."""
        ...

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        """In a worker: what draws one batch as torch tensors and updates its priorities."""
        ...


def step_of(kind: str) -> dict[str, np.ndarray]:
    """One step of one environment [1, …]."""
    random, settings = np.random.default_rng(0), KINDS[kind]
    obs = random.integers(0, 255, (2, 1, *settings["obs"])).astype(settings["dtype"])
    action = random.standard_normal((1, 6)).astype(np.float32)
    one, flag = np.ones(1, np.float32), np.zeros(1, bool)
    return {"obs": obs[0], "action": action, "reward": one, "terminated": flag, "truncated": flag, "next_obs": obs[1]}


class Ours:
    """`Memory.shared()` with a handle a process."""

    name, draws = "recollect, shared memory", "prioritized"
    sampling: Sampler = rc.Prioritized()

    def make(self, kind: str) -> Any:
        self._replay = _ours(kind, rc.Memory.shared(), self.sampling)  # the memory goes with the last who has it
        return self._replay.handle()

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        return _adder(rc.connect(shared), kind, env)

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        return _learner(rc.connect(shared), kind)


class OursUniform(Ours):
    """Without priorities."""

    name, draws = "recollect, shared memory, uniform", "uniform"
    sampling = rc.Uniform()

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        replay, batch_size = rc.connect(shared), KINDS[kind]["batch"]
        return lambda: replay.sample(batch_size)


class Threads:
    """The same in threads of one process."""

    name, draws = "recollect, threads", "prioritized"

    def make(self, kind: str) -> Any:
        return _ours(kind, "cpu", rc.Prioritized())

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        return _adder(shared, kind, env)

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        return _learner(shared, kind)


def _ours(kind: str, device: Any, sampler: Sampler) -> rc.ReplayBuffer:
    settings = KINDS[kind]
    obs = rc.Field(settings["obs"], torch.from_numpy(np.zeros(0, settings["dtype"])).dtype)
    replay = rc.ReplayBuffer(settings["capacity"], obs, 6, num_envs=MOST, sampler=sampler, device=device)
    step = {name: np.concatenate([value] * MOST) for name, value in step_of(kind).items()}
    for _ in range(settings["capacity"] // MOST):
        replay.add(**step)
    return replay


def _adder(replay: rc.ReplayBuffer, kind: str, env: int) -> Callable[[], object]:
    step = step_of(kind)
    return lambda: replay.add(**step, env_ids=[env])


def _learner(replay: rc.ReplayBuffer, kind: str) -> Callable[[], object]:
    batch_size = KINDS[kind]["batch"]
    priority = torch.rand(batch_size)
    return lambda: replay.update_priority(replay.sample(batch_size)["index"], priority)


class Cpprb:
    """`MPPrioritizedReplayBuffer`."""

    name, draws = "cpprb", "prioritized"

    def make(self, kind: str) -> Any:
        import cpprb  # pyright: ignore[reportMissingImports]

        settings = KINDS[kind]
        obs = {"shape": settings["obs"], "dtype": settings["dtype"]}
        fields = {"obs": obs, "action": {"shape": 6}, "reward": {}, "next_obs": obs, "terminated": {}}
        buffer = cpprb.MPPrioritizedReplayBuffer(settings["capacity"], fields, ctx=CONTEXT)
        step = {name: np.repeat(value, 100, 0) for name, value in self._step(kind).items()}
        for _ in range(settings["capacity"] // 100):
            buffer.add(**step)
        return buffer

    def _step(self, kind: str) -> dict[str, np.ndarray]:
        return {name: value for name, value in step_of(kind).items() if name != "truncated"}

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        step = self._step(kind)
        return lambda: shared.add(**step)

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        batch_size = KINDS[kind]["batch"]
        priority = np.random.default_rng(0).random(batch_size)

        def learn() -> None:
            batch = shared.sample(batch_size)
            for value in batch.values():
                torch.from_numpy(value)
            shared.update_priorities(batch["indexes"], priority)

        return learn


class TorchRL:
    """`TensorDictReplayBuffer` over a shared `LazyMemmapStorage`, as its documentation shows for several processes; it
    samples uniformly, since its prioritized sampler is not shared."""

    name, draws = "TorchRL, uniform", "uniform"

    def make(self, kind: str) -> Any:
        from tensordict import TensorDict
        from torchrl.data import (  # pyright: ignore[reportMissingImports]
            LazyMemmapStorage,
            TensorDictReplayBuffer,
        )

        settings = KINDS[kind]
        buffer = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(settings["capacity"]), batch_size=settings["batch"], shared=True
        )
        step = {name: torch.from_numpy(np.repeat(value, 100, 0)) for name, value in step_of(kind).items()}
        for _ in range(settings["capacity"] // 100):
            buffer.extend(TensorDict(step, [100]))
        return buffer

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        from tensordict import TensorDict

        step = {name: torch.as_tensor(value[0]) for name, value in step_of(kind).items()}
        return lambda: shared.add(TensorDict(step, []))

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        return shared.sample


ENTRANTS: dict[str, Entrant] = {
    "ours": Ours(),
    "uniform": OursUniform(),
    "threads": Threads(),
    "cpprb": Cpprb(),
    "torchrl": TorchRL(),
}

DRAWS = {entrant.name: entrant.draws for entrant in ENTRANTS.values()}


def work(who: str, shared: Any, kind: str, place: int, is_writer: bool, clock: Any, counts: Any) -> None:
    """One worker: calls until the clock says stop, and how many there were."""
    torch.set_num_threads(1)
    entrant = ENTRANTS[who]
    call = entrant.writer(shared, kind, place) if is_writer else entrant.sampler(shared, kind)
    for _ in range(5):
        call()
    clock[1 + place + MOST * (not is_writer)] = 1  # ready
    while clock[0] == 0:
        time.sleep(0.001)
    count, start = 0, time.perf_counter()
    while clock[0] == 1:
        call()
        count += 1
    counts[place + MOST * (not is_writer)] = count / (time.perf_counter() - start)


def run(who: str, shared: Any, kind: str, crowd: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Calls a second of all writers and of all samplers."""
    threads = who == "threads"
    clock = [0] * 9 if threads else CONTEXT.Array("i", 9, lock=False)
    counts = [0.0] * 8 if threads else CONTEXT.Array("d", 8, lock=False)
    places = [(place, True) for place in range(crowd[0])] + [(place, False) for place in range(crowd[1])]
    make = threading.Thread if threads else CONTEXT.Process
    workers = [
        make(target=work, args=(who, shared, kind, place, is_writer, clock, counts)) for place, is_writer in places
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 120
    while sum(clock[1:]) < len(workers):
        if time.monotonic() > deadline or not all(worker.is_alive() for worker in workers):
            raise RuntimeError("a worker did not get ready")
        time.sleep(0.01)
    clock[0] = 1
    time.sleep(seconds)
    clock[0] = 2
    for worker in workers:
        worker.join(60)
    return sum(counts[:MOST]), sum(counts[MOST:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all crowds, everybody in turn, and print what each got through."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round: for development, not for claims")
    parser.add_argument("--only", help="some of the kinds of rows, with commas between")
    parser.add_argument("--json", type=Path, help="where to write the results (default: benchmarks/results/<date>)")
    options = parser.parse_args(arguments)
    rounds, seconds = (1, 0.5) if options.quick else (3, 2.0)
    kinds = options.only.split(",") if options.only else list(KINDS)
    console = Console()
    rates: dict[str, dict[str, list[tuple[float, float]]]] = {}
    missing: dict[str, str] = {}
    for kind in kinds:
        made: dict[str, Any] = {}
        for who, entrant in ENTRANTS.items():
            try:
                made[who] = entrant.make(kind)
            except Exception as error:  # a peer that is missing or broken must not end the run
                missing[entrant.name] = f"{type(error).__name__}: {error}"
        for crowd in CROWDS:
            case = f"{kind}, {crowd[0]} writers, {crowd[1]} samplers"
            for _ in range(rounds):
                for who, shared in made.items():
                    with console.status(f"{case}: {who}"), suppress(RuntimeError):
                        found = run(who, shared, kind, crowd, seconds)
                        rates.setdefault(case, {}).setdefault(ENTRANTS[who].name, []).append(found)
    lines = judged(rates)
    console.print(table(lines))
    for name, reason in missing.items():
        console.print(f"[yellow]missing[/yellow] {name}: {reason}")
    about = {
        "suite": "processes",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": options.quick,
        "machine": machine.describe(),
        "peers": {name: _version(name) for name in ("cpprb", "torchrl")},
        "missing": missing,
    }
    path = options.json or RESULTS / file_name("processes", about)
    write_rates(path, about, lines)
    console.print(f"written to {path}")
    return 0


def _version(name: str) -> str | None:
    with suppress(Exception):
        return version(name)
    return None


def judged(rates: dict[str, dict[str, list[tuple[float, float]]]]) -> list[dict[str, Any]]:
    """A line for each case, kind of call and library: calls a second, and times the best peer."""
    lines = []
    for case, entrants in rates.items():
        for which, call in enumerate(("add", "sample")):
            medians = {name: float(np.median([found[which] for found in runs])) for name, runs in entrants.items()}
            for name, rate in medians.items():
                alike = DRAWS if call == "add" else {peer for peer in DRAWS if DRAWS[peer] == DRAWS[name]}
                peers = [medians[peer] for peer in medians if peer in alike and not peer.startswith("recollect")]
                if rate:
                    ratio = rate / max(peers) if peers and max(peers) else None
                    lines.append({"case": case, "call": call, "library": name, "rate": rate, "times_best_peer": ratio})
    return lines


def table(lines: list[dict[str, Any]]) -> Table:
    """The lines for people."""
    found = Table(
        "rows, crowd", "call", "library", title="calls a second, medians; shared memory is to be ≥ 3 × the best peer"
    )
    for heading in ("calls/s", "× best peer"):
        found.add_column(heading, justify="right")
    before = ""
    for line in lines:
        times = line["times_best_peer"]
        style = (
            ("green" if times >= BAR else "red")
            if line["library"] in (Ours.name, OursUniform.name) and times is not None
            else ""
        )
        ratio = "–" if times is None else f"{times:.2f}"
        case = "" if line["case"] == before else line["case"]
        found.add_row(case, line["call"], line["library"], f"{line['rate']:,.0f}", ratio, style=style)
        before = line["case"]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
