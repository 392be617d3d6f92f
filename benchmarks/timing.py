"""Time contestants against each other: interleaved rounds in random order, medians, bootstrap ratios.

The machine is expected to be noisy. Everybody runs in every round, so a slow minute slows all, and only ratios
within one run are meant to be compared.
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


@dataclass(frozen=True)
class Contestant:
    """Something to time."""

    name: str
    role: Role
    run: Callable[[], object]
    units: int = 1
    """One run does this many of the unit that is reported."""
    reset: Callable[[], object] | None = None
    """Called before each run, not timed."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    fewest_rounds: int
    """Even a contestant that is too slow for its share of `seconds` runs this often."""
    seconds: float
    """For one case, all contestants together; roughly."""
    sample_seconds: float
    """Repeat a short run within one sample until it takes this long."""


FULL = Effort(rounds=60, fewest_rounds=7, seconds=30.0, sample_seconds=2e-3)
QUICK = Effort(rounds=15, fewest_rounds=3, seconds=4.0, sample_seconds=1e-3)


@dataclass(frozen=True)
class Timing:
    """Seconds a unit of one contestant, by round."""

    contestant: Contestant
    samples: dict[int, float]

    @property
    def median(self) -> float:
        """The figure that is compared."""
        return float(np.median(list(self.samples.values())))

    @property
    def is_noisy(self) -> bool:
        """The slow tenth takes more than twice as long as the fast tenth: the machine was doing something else."""
        return self.percentile(90) > 2 * self.percentile(10)

    def percentile(self, q: float) -> float:
        """The duration that q percent of the samples stay below."""
        return float(np.percentile(list(self.samples.values()), q))


@dataclass(frozen=True)
class Interval:
    """A ratio of two medians, with the middle 95 % of its bootstrap distribution."""

    ratio: float
    low: float
    high: float


@dataclass
class _Lane:
    contestant: Contestant
    repeats: int
    stride: int
    samples: dict[int, float]


def race(contestants: Sequence[Contestant], effort: Effort, rng: np.random.Generator) -> list[Timing]:
    """Time all contestants in interleaved rounds, each round in a new random order."""
    lanes = [_calibrate(contestant, effort, len(contestants)) for contestant in contestants]
    for round_ in range(effort.rounds):
        for position in rng.permutation(len(lanes)):
            lane = lanes[position]
            if round_ % lane.stride == 0:
                lane.samples[round_] = _sample(lane.contestant, lane.repeats)
    return [Timing(_emptied(lane.contestant), lane.samples) for lane in lanes]


def speedup(of: Timing, over: Timing, rng: np.random.Generator, draws: int = 2000) -> Interval:
    """How many times as fast `of` is as `over`, from the rounds in which both ran."""
    shared = sorted(of.samples.keys() & over.samples.keys())
    mine, theirs = (np.array([timing.samples[r] for r in shared]) for timing in (of, over))
    index = rng.integers(len(shared), size=(draws, len(shared)))
    ratios = np.median(theirs[index], axis=1) / np.median(mine[index], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(np.median(theirs) / np.median(mine)), float(low), float(high))


def measured(name: str, role: Role, seconds: Sequence[float]) -> Timing:
    """What was timed elsewhere, in another process or in rounds of its own: seconds a unit, by round."""
    return Timing(Contestant(name, role, lambda: None), dict(enumerate(seconds)))


def fastest_peer(timings: Sequence[Timing], but: str | None = None) -> Timing | None:
    """The peer with the smallest median, `but` left out; None if no peer was timed."""
    peers = [timing for timing in timings if timing.contestant.role == "peer" and timing.contestant.name != but]
    return min(peers, key=lambda timing: timing.median, default=None)


def _emptied(contestant: Contestant) -> Contestant:
    """Without what it ran on, which may be gigabytes."""
    return replace(contestant, run=lambda: None, reset=None)


def _calibrate(contestant: Contestant, effort: Effort, num_contestants: int) -> _Lane:
    """Warm up, then choose how often to repeat within a sample and in which rounds to take part."""
    seconds = min(_sample(contestant, 1) for _ in range(3)) * contestant.units
    repeats = 1 if contestant.reset else max(1, math.ceil(effort.sample_seconds / max(seconds, 1e-9)))
    share = effort.seconds / num_contestants
    affordable = max(effort.fewest_rounds, int(share / (seconds * repeats)))
    # Powers of two: of two contestants, the slower one's rounds are all the faster one's too.
    stride = 2 ** max(0, int(math.log2(effort.rounds / affordable)))
    return _Lane(contestant, repeats, stride, {})


def _sample(contestant: Contestant, repeats: int) -> float:
    """Seconds a unit, of `repeats` runs in a row."""
    run = contestant.run
    if contestant.reset:
        contestant.reset()
    elif repeats > 1:
        run()  # the contestant before this one has left its own data in the caches
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
    """What a results file keeps of one contestant, in µs a unit."""
    return {
        "role": timing.contestant.role,
        "median_us": timing.median * 1e6,
        "p10_us": timing.percentile(10) * 1e6,
        "p90_us": timing.percentile(90) * 1e6,
        "noisy": timing.is_noisy,
        "samples": len(timing.samples),
    }
