"""T4, T7, T24, T25: rows stay whole around the ring, after an end, in every environment, and after `clear`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from relive_conformance.adapters.off_policy import NotOffered, PrioritizedReplay, ReplayBatch, ReplayShape
from relive_conformance.adapters.protocol import Adapter, Trajectory
from relive_conformance.case import Case
from relive_conformance.cases.estimators import returns
from relive_conformance.outcome import Differs, expect, expect_equal
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import Scenario, Script, play, same_transitions, scripts

CAPACITY = 10
SCENARIOS, LAYOUTS = 50, 5_000
"""Random scenarios, and the number of their steps in all: each step changes the layout of ring and episodes."""

GAMMA = 0.5
"""The discount of n-step transitions, whose powers are exact."""

Maker = Callable[[ReplayShape], Any]


def check_the_seam(adapter: Adapter) -> None:
    make = require(adapter.replay, "replay buffer")
    for pushed in (CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY + 1):
        scenario = play([(pushed, "open")])
        singly = Probe(make(scenario.shape(CAPACITY))).add_all(scenario.steps())
        _check_newest_rows(singly, scenario, pushed, "one by one")
        probe = Probe(make(scenario.shape(CAPACITY)))
        if probe.promise("extend") is not None:
            probe.verb("extend")(scenario.envs[0])
            _check_newest_rows(probe, scenario, pushed, "in one call")


def _check_newest_rows(probe: Probe, scenario: Scenario, pushed: int, how: str) -> None:
    stored_rows = set(range(max(0, pushed - CAPACITY), pushed))
    context = f"{pushed} rows given {how}"
    expect(probe.stored == len(stored_rows), f"{len(stored_rows)} stored of {context}", probe.stored)
    try:
        drawn_rows = {t for _, t in same_transitions(probe.draw(60 * CAPACITY), scenario)}
    except Differs as difference:
        raise Differs(f"{difference.expected} ({context})", difference.got) from None
    expect(drawn_rows == stored_rows, f"rows {sorted(stored_rows)} of {context}", f"rows {sorted(drawn_rows)}")


def check_next_observations(adapter: Adapter) -> None:
    tried = [_check_layouts(adapter.replay, num_envs) for num_envs in (1, 2) if adapter.replay]
    for option, make in adapter.replay_saving.items():
        try:
            tried += [_check_layouts(make, num_envs) for num_envs in (1, 2)]
        except Differs as difference:
            raise Differs(f"{difference.expected} with the option {option}", difference.got) from None
    if not any(tried):
        raise NotOffered("no replay buffer")


def _check_layouts(make: Maker, num_envs: int) -> bool:
    """Check some rows after every step of random scenarios; return False if the library has no such buffer."""
    random = np.random.default_rng(7)
    for _ in range(SCENARIOS):
        scenario = play(*scripts(random, num_envs, LAYOUTS // SCENARIOS))
        try:
            probe = Probe(make(scenario.shape(int(random.choice([4, 5, 7, 11, 16])))))
        except NotOffered:
            return False
        for step in scenario.steps(0, LAYOUTS // SCENARIOS):
            probe.add(step)
            if probe.stored:
                # Settings that save memory may forbid truncated steps.
                same_transitions(probe.sample(min(4, probe.stored)), scenario, names=("action", "reward"))
    return True


def check_clear(adapter: Adapter) -> None:
    scenario = play([(6, "open"), (6, "open")])
    _check_forgotten_rows(Probe(require(adapter.replay, "replay buffer")(scenario.shape(8))), scenario)
    n_step = adapter.n_step_plain or adapter.n_step
    if n_step is not None:
        _check_forgotten_rows(Probe(n_step(scenario.shape(8), 3, GAMMA)), scenario)
    with suppress(NotOffered):
        _check_forgotten_priorities(require(adapter.prioritized, "prioritized buffer")(scenario.shape(8)), scenario)


def _check_forgotten_priorities(replay: PrioritizedReplay, scenario: Scenario) -> None:
    probe = Probe(replay).add_all(scenario.steps(0, 6))
    probe.sample(6)
    replay.set_priority(replay.handles(probe.native), np.full(6, 9.0))
    probe.verb("clear")()
    batch = probe.add_all(scenario.steps(6, 10)).draw(64)
    drawn_rows = {t for _, t in scenario.rows_of(batch.obs)}
    expect(
        drawn_rows == {6, 7, 8, 9},
        "rows 6 to 9, added after clear() of a prioritized buffer",
        f"rows {sorted(drawn_rows)}",
    )
    expect_equal("weights of rows after clear()", batch.weight, np.ones(len(batch.obs)), 1e-5)


def _check_forgotten_rows(probe: Probe, scenario: Scenario) -> None:
    probe.add_all(scenario.steps(0, 6)).verb("clear")()
    expect(probe.stored == 0, "0 stored after clear()", probe.stored)
    probe.add_all(scenario.steps(6, 12))
    old = [t for _, t in scenario.rows_of(probe.draw(64).obs) if t < 6]
    expect(not old, "only rows that were added after clear()", f"row {old[0] if old else ''} from before")


ENDS: list[Script] = [
    [(2, "terminated"), (6, "open")],
    [(5, "truncated"), (3, "open")],
    [(8, "open")],
]
NEVER_ENDS = 2
"""The environment that never ends."""


def check_ends_per_environment(adapter: Adapter) -> None:
    scenario, tried = play(*ENDS), 0
    names = [field.name for field in dataclasses.fields(Trajectory)]
    if adapter.gae is not None:
        columns = [_trajectory(scenario, env) for env in range(3)]
        together = Trajectory(*(np.concatenate([getattr(c, name) for c in columns], 1) for name in names))
        try:
            all_returns = returns(adapter.gae, together, gamma=0.5, lam=0.5)
            for env, alone in enumerate(columns):
                apart = returns(adapter.gae, alone, gamma=0.5, lam=0.5)[:, 0]
                expect_equal(f"returns of environment {env} among three", all_returns[:, env], apart, 1e-4)
            tried += 1
        except NotOffered:
            pass
    for make in (adapter.replay, _three_steps(adapter)):
        try:
            probe = Probe(require(make, "replay buffer")(scenario.shape(20))).add_all(scenario.steps())
        except NotOffered:
            continue
        # T5 and T7 test ends, so this looks only at the environment that never ends.
        if make is adapter.replay:
            batch = probe.draw(240)
            rows = [env == NEVER_ENDS for env, _ in scenario.rows_of(batch.obs)]
            same_transitions(ReplayBatch(*(leaf[rows] for leaf in batch[:5] if leaf is not None)), scenario)
        else:
            match_windows(probe, scenario, 3, envs=(NEVER_ENDS,))
        tried += 1
    if not tried:
        raise NotOffered("neither a replay buffer nor an estimator of several environments")


def _trajectory(scenario: Scenario, env: int) -> Trajectory:
    steps = scenario.envs[env]
    value = steps.obs[:, :1]
    return Trajectory(steps.reward[:, None], value, steps.next_obs[:, :1], *_flags(scenario, env))


def _flags(scenario: Scenario, env: int) -> tuple[np.ndarray, np.ndarray]:
    steps = scenario.envs[env]
    # T2 tests time limits, and not every library accepts them.
    return steps.ended[:, None], np.zeros_like(steps.ended)[:, None]


def _three_steps(adapter: Adapter) -> Maker | None:
    n_step = adapter.n_step_plain or adapter.n_step
    return None if n_step is None else lambda shape: n_step(shape, 3, GAMMA)


def match_windows(probe: Probe, scenario: Scenario, n: int, envs: tuple[int, ...] | None = None) -> set[int]:
    """Raise unless every n-step transition stops at its episode's end or at the newest row; return the drawn times."""
    gamma, num_steps = GAMMA, len(scenario)
    batch = probe.draw(40 * len(scenario.envs) * min(num_steps, 20))
    rows = scenario.rows_of(batch.obs)
    for i, (env, t) in enumerate(rows):
        if envs is not None and env not in envs:
            continue
        last = min(scenario.last((env, t), num_steps), t + n - 1)
        steps = scenario.at([(env, k) for k in range(t, last + 1)])
        where = f"of {n} steps from {t}" + (f" of environment {env}" if len(scenario.envs) > 1 else "")
        where += ", which ends terminated" if steps.terminated[-1] else ""
        where += ", which ends truncated" if steps.truncated[-1] else ""
        reward = float((gamma ** np.arange(len(steps)) * steps.reward).sum())
        expect_equal(f"reward {where}", batch.reward[i], reward, 1e-4)
        if not probe.promise("flags_of_first_step"):
            expect_equal(f"terminated {where}", bool(batch.terminated[i]), bool(steps.terminated[-1]))
        # After a termination, no target reads the next observation.
        if not steps.terminated[-1]:
            expect_equal(f"next_obs {where}", batch.next_obs[i], steps.next_obs[-1])
        if batch.discount is not None and not np.isnan(batch.discount[i]):
            expect_equal(f"discount {where}", batch.discount[i], gamma ** len(steps), 1e-5)
    return {t for _, t in rows}


CASES = (
    Case(
        "T4",
        "rows around the ring",
        "Capacity c, and c − 1, c, c + 1, 2c + 1 rows pushed, singly and in one call.",
        "the fields of a row stay together; exactly the newest c rows are stored",
        check_the_seam,
    ),
    Case(
        "T7",
        "next_obs as given",
        "The next observation of a drawn row, over 10,000 random layouts of episodes and ring positions, also with the "
        "options that save memory.",
        "the observation that was added, also at the end of an episode",
        check_next_observations,
    ),
    Case(
        "T24",
        "clear forgets everything",
        "clear(), then new rows.",
        "earlier rows, priorities and open windows are gone",
        check_clear,
    ),
    Case(
        "T25",
        "ends of one environment only",
        "Three environments whose episodes end at different times.",
        "an end affects only its own environment: estimates, transitions, n-step windows",
        check_ends_per_environment,
    ),
)
