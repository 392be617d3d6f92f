"""T26: frame stacks rebuilt from single frames."""

from __future__ import annotations

import numpy as np

from relive_conformance.adapters.off_policy import Array, Transitions
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.outcome import expect
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import Scenario

STACK = 4
LENGTHS = (9, 3, 1, 12, 5, 8, 2, 10, 7)
CAPACITY = 24


def _stacks(frames: Array) -> Array:
    """Stack frames [L + 1, H, W] to [L + 1, H, W, STACK], the newest last; the first frame pads the start."""
    padded = np.concatenate([np.repeat(frames[:1], STACK - 1, 0), frames])
    return np.stack([padded[k : k + len(frames)] for k in range(STACK)], -1)


def _scenario() -> Scenario:
    random, parts = np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        stacks = _stacks(random.integers(1, 255, (length + 1, 3, 2), dtype=np.uint8))
        ends = np.arange(length) == length - 1
        action, reward = np.full((length, 1), number, np.float32), np.arange(length, dtype=np.float32)
        terminated, truncated = ends & (number % 2 == 0), ends & (number % 2 == 1)
        parts.append((stacks[:-1], action, reward, terminated, truncated, stacks[1:]))
    return Scenario([Transitions(*(np.concatenate(column) for column in zip(*parts, strict=True)))])


def check_stacks(adapter: Adapter) -> None:
    make, scenario = require(adapter.stacked, "stacks that are kept as single frames"), _scenario()
    probe = Probe(make(scenario.shape(CAPACITY)))
    place = {
        (float(a[0]), float(r)): t
        for t, (a, r) in enumerate(zip(scenario.envs[0].action, scenario.envs[0].reward, strict=True))
    }
    for written, step in enumerate(scenario.steps(), 1):
        probe.add(step)
        if written % 6:
            continue
        batch = probe.draw(96)
        for i in range(len(batch.obs)):
            t = place[float(batch.action[i].reshape(-1)[0]), float(batch.reward[i])]
            _equal(f"obs of step {t} after {written}", batch.obs[i], scenario.envs[0].obs[t])
            # T7 tests what follows an end or the newest step.
            if t + 1 < written and not scenario.envs[0].ended[t]:
                _equal(f"next_obs of step {t} after {written}", batch.next_obs[i], scenario.envs[0].next_obs[t])


def _equal(what: str, got: Array, expected: Array) -> None:
    newest, given = (array[0, 0].tolist() for array in (got, expected))
    expect(np.array_equal(got, expected), f"{what}: its upper left pixels {given}", newest)


CASES = (
    Case(
        "T26",
        "frame stacks rebuilt",
        "Frame stacks rebuilt from single frames, across starts of episodes and the ring's seam.",
        "the stacks that the environment returned",
        check_stacks,
    ),
)
