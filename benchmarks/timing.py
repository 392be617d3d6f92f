"""Time contestants in interleaved rounds in random order: medians, and ratios with bootstrap intervals.

The machine is expected to be noisy. Every contestant runs in every round, so a slow minute slows all of them, and only
ratios within one run can be compared.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np

Role = Literal["ours", "peer", "limit"]
MEMCPY = "memcpy of the same bytes"


@dataclass(frozen=True)
class Contestant:
    """An operation to time."""

    name: str
    role: Role
    run: Callable[[], object]
    units: int = 1
    """Units per run; durations are reported per unit."""
    reset: Callable[[], object] | None = None
    """Called before each run, not timed."""


@dataclass(frozen=True)
class Effort:
    """Measuring effort."""

    rounds: int
    min_rounds: int
    """Minimum rounds of a contestant that is too slow for its share of `seconds`."""
    seconds: float
    """Approximate seconds per case, all contestants together."""
    sample_seconds: float
    """Minimum duration of a sample in seconds; shorter runs are repeated within it."""


FULL = Effort(rounds=60, min_rounds=7, seconds=30.0, sample_seconds=2e-3)
QUICK = Effort(rounds=15, min_rounds=3, seconds=4.0, sample_seconds=1e-3)


@dataclass(frozen=True)
class Timing:
    """Seconds per unit of one contestant, by round."""

    contestant: Contestant
    samples: dict[int, float]

    @property
    def median(self) -> float:
        """Median duration."""
        return float(np.median(list(self.samples.values())))

    @property
    def is_noisy(self) -> bool:
        """Whether the slow tenth takes more than twice as long as the fast tenth, because the machine was busy."""
        return self.percentile(90) > 2 * self.percentile(10)

    def percentile(self, q: float) -> float:
        """Return the q-th percentile of the durations."""
        return float(np.percentile(list(self.samples.values()), q))


@dataclass(frozen=True)
class Interval:
    """A ratio of two medians, with the middle 95 % of its bootstrap distribution."""

    ratio: float
    low: float
    high: float


@dataclass
class _Schedule:
    contestant: Contestant
    repeats: int
    stride: int
    samples: dict[int, float]


def race(contestants: Sequence[Contestant], effort: Effort, rng: np.random.Generator) -> list[Timing]:
    """Time all contestants in interleaved rounds, each round in a new random order."""
    schedules = [_calibrate(contestant, effort, len(contestants)) for contestant in contestants]
    for number in range(effort.rounds):
        for position in rng.permutation(len(schedules)):
            schedule = schedules[position]
            if number % schedule.stride == 0:
                schedule.samples[number] = _sample(schedule.contestant, schedule.repeats)
    return [Timing(_without_data(schedule.contestant), schedule.samples) for schedule in schedules]


def speedup(timing: Timing, reference: Timing, rng: np.random.Generator, draws: int = 2000) -> Interval:
    """Return the speed relative to a reference, from the rounds in which both ran."""
    shared = sorted(timing.samples.keys() & reference.samples.keys())
    seconds, reference_seconds = (np.array([t.samples[r] for r in shared]) for t in (timing, reference))
    index = rng.integers(len(shared), size=(draws, len(shared)))
    ratios = np.median(reference_seconds[index], axis=1) / np.median(seconds[index], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(np.median(reference_seconds) / np.median(seconds)), float(low), float(high))


def make_timing(name: str, role: Role, seconds: Sequence[float]) -> Timing:
    """Return a timing make_timing elsewhere, for example in another process: seconds per unit, by round."""
    return Timing(Contestant(name, role, lambda: None), dict(enumerate(seconds)))


def make_memcpy(nbytes: int, units: int = 1) -> Contestant:
    """Return the physical limit: one copy of the bytes that an operation must move, between warm memory."""
    source = np.ones(max(nbytes, 1), np.uint8)
    target = np.zeros_like(source)
    return Contestant(MEMCPY, "limit", lambda: np.copyto(target, source), units=units)


def fastest_peer(timings: Sequence[Timing], excluded: str | None = None) -> Timing | None:
    """Return the peer with the smallest median, except `excluded`; None if no peer was timed."""
    peers = [timing for timing in timings if timing.contestant.role == "peer" and timing.contestant.name != excluded]
    return min(peers, key=lambda timing: timing.median, default=None)


def _without_data(contestant: Contestant) -> Contestant:
    """Return a copy without the contestant's data, which may be gigabytes."""
    return replace(contestant, run=lambda: None, reset=None)


def _calibrate(contestant: Contestant, effort: Effort, num_contestants: int) -> _Schedule:
    """Warm up, then choose how often to repeat within a sample and in which rounds to take part."""
    seconds = min(_sample(contestant, 1) for _ in range(3)) * contestant.units
    repeats = 1 if contestant.reset else max(1, math.ceil(effort.sample_seconds / max(seconds, 1e-9)))
    share = effort.seconds / num_contestants
    affordable = max(effort.min_rounds, int(share / (seconds * repeats)))
    # Powers of two: the slower contestant's rounds are all rounds of the faster one.
    stride = 2 ** max(0, int(math.log2(effort.rounds / affordable)))
    return _Schedule(contestant, repeats, stride, {})


def _sample(contestant: Contestant, repeats: int) -> float:
    """Return the seconds per unit of `repeats` consecutive runs."""
    run = contestant.run
    if contestant.reset:
        contestant.reset()
    elif repeats > 1:
        run()  # the previous contestant has left its data in the caches
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        start = perf_counter()
        for _ in range(repeats):
            run()
        elapsed = perf_counter() - start
    finally:
        if was_enabled:
            gc.enable()
    return elapsed / (repeats * contestant.units)


def summary(timing: Timing) -> dict[str, Any]:
    """Return the figures of one contestant for a results file, in µs per unit."""
    return {
        "role": timing.contestant.role,
        "median_us": timing.median * 1e6,
        "p10_us": timing.percentile(10) * 1e6,
        "p90_us": timing.percentile(90) * 1e6,
        "noisy": timing.is_noisy,
        "samples": len(timing.samples),
    }
