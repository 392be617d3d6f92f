"""Measure how cost grows: advantages with T and N, minibatches with their size, replay with capacity and batch size.

Run it as `python -m benchmarks.scaling [--quick] [--only rollout,replay] [--json PATH]`, beside the peers that are
fastest at each; `python -m benchmarks.page` draws the curves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from relive.storage.allocator import available_host_bytes
from relive_conformance.adapters import Adapter, NotOffered, RolloutShape

from . import on_policy, replay
from .experience import Experience, make_experience
from .on_policy import SMALL
from .replay import ROBOT, sample_and_update
from .rollouts import make_rollout
from .suite import Session, contestant, enter, refuse
from .timing import QUICK, Contestant, Effort, Timing, race
from .verify_replay import check_transitions, fill

TIMES = (16, 64, 256, 1024, 4096)
ENVS = (1, 16, 128, 1024, 8192)
MINIBATCHES = (64, 256, 1024, 4096)
CAPACITIES = tuple(10**power for power in range(3, 8))
BATCHES = (32, 128, 512, 2048, 8192)
DEFAULT_TIME, DEFAULT_ENVS, DEFAULT_CAPACITY, DEFAULT_BATCH = 128, 64, 10**6, 256
"""Sizes that stay fixed while another one grows."""
ADDED_STEPS = 1000
BYTES_PER_ROW = 250
"""Upper bound of the bytes of a ROBOT row with a priority, in any library."""
EFFORT = Effort(rounds=40, min_rounds=7, seconds=8.0, sample_seconds=2e-3)
QUICK_EFFORT = replace(QUICK, seconds=1.5)
LIBRARIES = {
    "gae": ("relive", "rlox", "Tianshou", "Stable-Baselines3"),
    "epoch": ("relive", "rlox", "skrl", "Stable-Baselines3"),
    "uniform": ("relive", "rlox", "cpprb"),
    "prioritized": ("relive", "rlox", "cpprb", "Tianshou"),
    "add": ("relive", "rlox", "Stable-Baselines3"),
}
"""relive and the fastest peers, by operation."""


@dataclass(frozen=True)
class Point:
    """One library at one size."""

    operation: str
    library: str
    axis: str
    size: int
    median_us: float
    p25_us: float
    p75_us: float


def make_point(timing: Timing, operation: str, axis: str, size: int) -> Point:
    """Return the plotted figures of a timing."""
    figures = (timing.median, timing.percentile(25), timing.percentile(75))
    return Point(operation, timing.contestant.name, axis, size, *(seconds * 1e6 for seconds in figures))


def rollout_cases(quick: bool) -> Iterator[tuple[str, int, on_policy.Case]]:
    """Yield (axis, size, case): advantages by T and by N, minibatches by batch size."""
    for time in TIMES[: 3 if quick else None]:
        yield "T", time, on_policy.Case("gae", f"gae T={time}", RolloutShape(time, DEFAULT_ENVS, 1, 1))
    for envs in ENVS[: 3 if quick else None]:
        yield "N", envs, on_policy.Case("gae", f"gae N={envs}", RolloutShape(DEFAULT_TIME, envs, 1, 1))
    for size in MINIBATCHES:
        yield "batch", size, on_policy.Case("epoch", f"epoch of {size}", SMALL, size)


def measure_rollouts(session: Session, effort: Effort) -> Iterator[Point]:
    """Time every case with the fastest peers."""
    for axis, size, case in rollout_cases(session.options.quick):
        with session.console.status(case.name):
            data = make_rollout(case.shape, seed=0)
            chosen = [peer for peer in session.discovery.adapters if peer.name in LIBRARIES[case.operation]]
            _, contestants = enter(
                case.name, chosen, lambda peer, case=case, data=data: on_policy.ENTER[case.operation](peer, case, data)
            )
            contestants.append(on_policy.make_limit(case, data))
            for timing in race(contestants, effort, session.rng):
                yield make_point(timing, case.operation, axis, size)


class FullBuffers:
    """Full replay buffers of all libraries at one capacity, reused for all batch sizes."""

    def __init__(self, operation: str, data: Experience, peers: Sequence[Adapter], console: Console) -> None:
        self._operation, self._data = operation, data
        chosen = [peer for peer in peers if peer.name in LIBRARIES[operation]]
        self._runs: dict[str, Callable[[int], Callable[[], object]]] = {}
        result, _ = enter(operation, chosen, self._fill)
        for name, reason in result.refused.items():
            console.print(f"[red]not timed[/red] {operation} at {data.shape.capacity:,}: {name}: {reason}")
        self._peers = [peer for peer in chosen if peer.name in self._runs]

    def _fill(self, peer: Adapter) -> Contestant:
        shape = self._data.shape
        free = available_host_bytes()
        if free is not None and 2 * shape.capacity * BYTES_PER_ROW > free:
            refuse(f"{shape.capacity * BYTES_PER_ROW / 2**30:.1f} GiB are too much for this machine now")
        make = peer.prioritized if self._operation == "prioritized" else peer.replay
        if make is None:
            raise NotOffered
        buffer: Any = make(shape)
        fill(buffer, self._data)
        refuse(check_transitions(buffer, self._data, DEFAULT_BATCH))
        if self._operation == "prioritized":
            self._runs[peer.name] = lambda batch_size: sample_and_update(buffer, batch_size)
        elif self._operation == "uniform":
            self._runs[peer.name] = lambda batch_size: lambda: buffer.sample(batch_size)
        else:
            steps = make_experience(shape, ADDED_STEPS, seed=1).steps()
            prepared = [buffer.prepare(step) for step in steps]
            self._runs[peer.name] = lambda _: lambda: [buffer.add(step) for step in prepared]
        return contestant(peer, lambda: None)

    def time(self, axis: str, size: int, batch_size: int, effort: Effort, rng: np.random.Generator) -> Iterator[Point]:
        """Time the buffers at one batch size."""
        units = ADDED_STEPS if self._operation == "add" else 1
        entered = [contestant(peer, self._runs[peer.name](batch_size), units=units) for peer in self._peers]
        case = replay.Case(self._operation, "", self._data.shape, batch_size)
        limit = replay.make_limit(case, make_experience(case.shape, ADDED_STEPS, seed=1))
        for timing in race([*entered, limit], effort, rng):
            yield make_point(timing, self._operation, axis, size)


def measure_replay(session: Session, effort: Effort) -> Iterator[Point]:
    """Time every operation at every capacity with the default batch, and every batch at the default capacity."""
    quick = session.options.quick
    default_capacity = 10**5 if quick else DEFAULT_CAPACITY
    for capacity in CAPACITIES[: 3 if quick else None]:
        with session.console.status(f"capacity {capacity:,}"):
            data = make_experience(ROBOT._replace(capacity=capacity), capacity, seed=0)
            for operation in ("uniform", "prioritized", "add"):
                buffers = FullBuffers(operation, data, session.discovery.adapters, session.console)
                yield from buffers.time("capacity", capacity, DEFAULT_BATCH, effort, session.rng)
                for size in BATCHES if capacity == default_capacity and operation != "add" else ():
                    yield from buffers.time("batch", size, size, effort, session.rng)
                del buffers
                gc.collect()


PARTS = {"rollout": measure_rollouts, "replay": measure_replay}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the figures."""
    session = Session.start("scaling", __doc__ or "", PARTS, arguments)
    effort = QUICK_EFFORT if session.options.quick else EFFORT
    points = [asdict(point) for part in session.options.only for point in PARTS[part](session, effort)]
    return session.finish([], points=points)


if __name__ == "__main__":
    raise SystemExit(main())
