"""T14: hindsight goals."""

from __future__ import annotations

import numpy as np

from relive_conformance.adapters.off_policy import GoalReplay, GoalStep, NotOffered, goal_reward
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.outcome import expect, expect_equal
from relive_conformance.probe import require

LENGTHS = (6, 4, 7, 5, 6)
"""The lengths of the episodes: each fits in the ring, and together they do not."""
CAPACITY = 16
UNREACHED = -1.0


def check_goals(adapter: Adapter) -> None:
    make = require(adapter.hindsight, "hindsight goals")
    tried = 0
    for strategy in ("future", "final"):
        try:
            replay = make(CAPACITY, strategy)
        except NotOffered:
            continue
        _check(replay, strategy)
        tried += 1
    if not tried:
        raise NotOffered("no hindsight goals")


def _check(replay: GoalReplay, strategy: str) -> None:
    for episode, length in enumerate(LENGTHS):
        for t in range(length):
            at = 100.0 * (episode + 1) + t
            replay.add(GoalStep(at, UNREACHED, at + 1, -1.0, False, t == length - 1))
    exchanged = 0
    for _ in range(40):
        batch = replay.sample(16)
        for i, (at, goal, next_at) in enumerate(zip(batch.at, batch.goal, batch.next_at, strict=True)):
            expect_equal(f"next state of {at:g}", next_at, at + 1)
            reached = float(goal_reward(next_at, goal))
            expect_equal(f"reward at {at:g} for the goal {goal:g}", batch.reward[i], reached)
            if batch.terminated is not None:
                expect_equal(f"terminated at {at:g} for the goal {goal:g}", bool(batch.terminated[i]), reached == 0.0)
            if goal == UNREACHED:
                continue
            exchanged += 1
            episode = int(at // 100)
            last = 100.0 * episode + LENGTHS[episode - 1]
            goals_of = (last,) if strategy == "final" else tuple(np.arange(next_at, last + 1))
            expect(goal in goals_of, f"a goal of {strategy} in {list(map(float, goals_of))} at {at:g}", f"{goal:g}")
    expect(exchanged > 0, "at least one relabelled goal", "no relabelled goal")


CASES = (
    Case(
        "T14",
        "hindsight goals",
        "Hindsight goals of episodes that wrap around the ring, strategies future and final.",
        "only goals of the same episode; the final goal is achieved after its last step; rewards are recomputed",
        check_goals,
    ),
)
