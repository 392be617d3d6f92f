"""T15, T16: sequences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from relive_conformance.adapters.off_policy import Array, NotOffered, ReplayBatch
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.outcome import expect, expect_equal
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import Scenario, Script, play

LENGTH = 3
SCRIPTS: dict[str, list[Script]] = {
    "the ring's seam": [[(34, "open")]],
    "unwritten rows": [[(7, "open")]],
    "ends of episodes": [
        [(5, "terminated"), (4, "truncated"), (6, "terminated"), (5, "truncated"), (4, "terminated")] * 2
    ],
    "ends of episodes in two environments": [
        [(5, "terminated"), (4, "truncated"), (6, "terminated")] * 3,
        [(3, "truncated"), (7, "terminated"), (5, "truncated")] * 3,
    ],
}


def check_sequences(adapter: Adapter) -> None:
    make = require(adapter.sequence, "sequences")
    for name, scripts in SCRIPTS.items():
        scenario = play(*scripts)
        try:
            probe = Probe(make(scenario.shape(24), LENGTH))
        except NotOffered:
            continue
        ends = "ends" in name
        if probe.promise("crosses_episodes" if ends else "finished_only"):
            continue
        probe.add_all(scenario.steps())
        seen: set[tuple[int, int]] = set()
        for _ in range(60):
            seen |= _check_runs(probe.sample(8), scenario, name)
        if ends:
            _check_last_steps(scenario, seen)


def _check_last_steps(scenario: Scenario, seen: set[tuple[int, int]]) -> None:
    """Check steps of the newest episodes, which any ring of this size still holds."""
    newest = range(len(scenario) - 12, len(scenario))
    last = {(n, t) for n, env in enumerate(scenario.envs) for t in newest if env.ended[t]}
    missing = sorted(t for _, t in last - seen)
    expect(not missing, "the last step of every episode in a sequence", f"steps {missing} in no sequence")


def _check_runs(batch: ReplayBatch, scenario: Scenario, name: str) -> set[tuple[int, int]]:
    seen: set[tuple[int, int]] = set()
    real = np.ones(batch.reward.shape[:2], bool) if batch.mask is None else batch.mask.astype(bool)
    for i in range(len(batch.obs)):
        rows = scenario.rows_of(batch.obs[i][real[i]])
        for (env, t), (following_env, following) in pairwise(rows):
            goes_on = env == following_env and following == t + 1 and not scenario.envs[env].ended[t]
            expected = f"a run of steps that stops at {name}"
            expect(goes_on, expected, f"step {following} of environment {following_env} after {t} of {env}")
        seen |= set(rows)
    return seen


def check_burn_in(adapter: Adapter) -> None:
    make = require(adapter.burn_in, "burn-in")
    scenario, before, length = play([(4, "terminated"), (6, "open")]), 2, 2
    probe = Probe(make(scenario.shape(24), before, length)).add_all(scenario.steps())
    batch = probe.draw(200)
    mask: Array = np.ones(batch.reward.shape[:2], bool) if batch.mask is None else batch.mask.astype(bool)
    train = mask & (np.arange(mask.shape[1]) >= before) if batch.train is None else batch.train.astype(bool)
    starts: set[int] = set()
    for i, obs in enumerate(batch.obs):
        real, trained = ([t for _, t in scenario.rows_of(obs[which[i]])] for which in (mask, train))
        expect(trained, "a sequence with steps to train on", "none")
        t = trained[0]
        starts.add(t)
        first, last = 0 if t < 4 else 4, scenario.last((0, t), len(scenario))
        what = f"of a sequence from step {t} with a burn-in of {before}"
        expect_equal(f"real steps {what}", real, range(max(first, t - before), min(last, t + length - 1) + 1))
        expect_equal(f"trained steps {what}", trained, range(t, min(last, t + length - 1) + 1))
        # If the length of the burn-in varies, a stored state can only belong to position 0, which must be a real step.
        if batch.train is not None:
            expect_equal(f"mask {what}", mask[i], np.arange(before + length) < len(real))
    expect(starts == set(range(10)), "a sequence from every step", f"from {sorted(starts)}")


CASES = (
    Case(
        "T15",
        "sequences inside episodes",
        "Sequences around ends of episodes, the ring's seam and unwritten rows.",
        "consecutive steps of one episode; a sequence contains the last step of every episode",
        check_sequences,
    ),
    Case(
        "T16",
        "burn-in mask",
        "Burn-in at the start of an episode.",
        "burn-in is of the same episode and not trained on, the rest is padding, and every step can be trained on",
        check_burn_in,
    ),
)
