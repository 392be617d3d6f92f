"""T8 … T12: priorities."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from relive_conformance.adapters.off_policy import ALPHA, BETA, Array, PrioritizedReplay, ReplayShape
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.outcome import Differs, expect, expect_equal, figures
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import Scenario, play

UPDATES = 1_000_000
_WEIGHT_TOLERANCE = 5e-3
"""The tolerance for the small numbers that libraries add to priorities."""


class Ranked:
    """A full prioritized buffer whose rows are known by their time t, from 0 to size − 1."""

    def __init__(self, make: Callable[[ReplayShape], PrioritizedReplay], size: int, more: int = 0) -> None:
        self.scenario: Scenario = play([(size + more, "open")])
        self.size, self.replay = size, make(self.scenario.shape(size))
        self.probe = Probe(self.replay).add_all(self.scenario.steps(0, size))
        self._handle: dict[int, object] = {}
        while len(self._handle) < size:
            rows = [t for _, t in self.scenario.rows_of(self.probe.sample(min(32, size)).obs)]
            handles = np.asarray(self.replay.handles(self.probe.native))
            self._handle |= dict(zip(rows, handles, strict=True))

    def set(self, rows: list[int] | Array, priority: Array) -> None:
        """Set the priorities of these rows."""
        handles = np.array([self._handle[int(t)] for t in rows])
        self.replay.set_priority(handles, np.asarray(priority, np.float64))

    def counts(self, draws: int) -> tuple[Array, Array]:
        """Return the number of draws of each row, and its newest weight (NaN if never drawn)."""
        counts, weights = np.zeros(len(self.scenario.envs[0])), np.full(len(self.scenario.envs[0]), np.nan)
        while counts.sum() < draws:
            batch = self.probe.sample(min(32, self.size))
            rows = np.array([t for _, t in self.scenario.rows_of(batch.obs)])
            np.add.at(counts, rows, 1)
            if batch.weight is not None:
                weights[rows] = batch.weight
        return counts, weights

    def check_weights(self, priority: Array, what: str) -> None:
        """Raise unless the weights of each batch are p^(−αβ) up to a factor, and at most 1."""
        for _ in range(20):
            batch = self.probe.sample(min(32, self.size))
            rows = [t for _, t in self.scenario.rows_of(batch.obs)]
            expect(batch.weight is not None, "weights in the batch", "no weights")
            weight = np.asarray(batch.weight, np.float64)
            expected = (priority[rows] / priority[rows].min()) ** (-ALPHA * BETA)
            expect_equal(
                f"weights of {what}, as parts of the largest", weight / weight.max(), expected, _WEIGHT_TOLERANCE
            )
            expect(weight.max() <= 1 + 1e-5, "weights of at most 1", figures(weight.max()))


def check_weights(adapter: Adapter) -> None:
    make = require(adapter.prioritized, "prioritized buffer")
    priority = np.array([1.0, 2.0, 4.0, 8.0])
    for scale in (1.0, 1e6):
        ranked = Ranked(make, 4)
        ranked.set(np.arange(4), scale * priority)
        ranked.check_weights(priority, f"priorities {figures(scale * priority)}")
    ranked = Ranked(make, 4)
    ranked.set([0, 1, 2, 3], np.array([1e-9, 1.0, 1.0, 1.0]))
    ranked.set([0], np.array([1.0]))
    expect_equal(
        "weights of equal priorities, one of which was tiny", ranked.counts(200)[1], np.ones(4), _WEIGHT_TOLERANCE
    )


WRONG = (float("nan"), float("inf"), float("-inf"), -1.0)


def check_invalid_priorities(adapter: Adapter) -> None:
    make = require(adapter.prioritized_strictly or adapter.prioritized, "prioritized buffer")
    priority = np.array([1.0, 2.0, 4.0, 8.0])
    for wrong in WRONG:
        ranked = Ranked(make, 4)
        ranked.set([0, 1, 2, 3], priority)
        try:
            ranked.set([0, 1], np.array([5.0, wrong]))
        except Exception:
            try:
                ranked.check_weights(priority, "the rows")
            except Differs as difference:
                raise Differs(f"nothing changed by refusing {wrong}: {difference.expected}", difference.got) from None
            continue
        raise Differs(f"priority {wrong} to be refused", f"accepted; then {_state(ranked)}")
    if adapter.prioritized_strictly is not None:
        _zeros(adapter.prioritized_strictly)


def _state(ranked: Ranked) -> str:
    try:
        counts, weight = ranked.counts(400)
        return f"the rows are drawn {figures(counts)} times, with weights {figures(np.round(weight, 3))}"
    except BaseException as error:
        return f"sampling raises {type(error).__name__}: {error}"[:100]


def _zeros(make: Callable[[ReplayShape], PrioritizedReplay]) -> None:
    ranked = Ranked(make, 4)
    ranked.set([0, 1, 2, 3], np.array([0.0, 1.0, 0.0, 1e-3]))
    rows = np.flatnonzero(ranked.counts(4000)[0]).tolist()
    expect(set(rows) <= {1, 3}, "only rows 1 and 3 drawn of priorities [0, 1, 0, 0.001]", f"rows {rows}")


def check_a_million_updates(adapter: Adapter) -> None:
    make = require(adapter.prioritized_strictly or adapter.prioritized, "prioritized buffer")
    size, random = 256, np.random.default_rng(0)
    ranked = Ranked(make, size)
    for _ in range(UPDATES // size):
        ranked.set(random.permutation(size), 10 ** random.uniform(-8, 8, size))
    ranked.set(np.arange(size), np.full(size, 1e-2))
    counts, weight = ranked.counts(100 * size)
    check_share(counts, np.full(size, 1 / size), f"{UPDATES:,} updates from 1e-8 to 1e8 and then equal priorities")
    expect_equal("weights of equal priorities", weight, np.ones(size), _WEIGHT_TOLERANCE)
    priority = random.uniform(0.5, 2, size)
    ranked.set(np.arange(size), priority)
    share = priority**ALPHA / (priority**ALPHA).sum()
    check_share(ranked.counts(100 * size)[0], share, f"{UPDATES:,} updates and then priorities from 0.5 to 2")
    ranked.check_weights(priority, f"priorities after {UPDATES:,} updates")


def check_share(counts: Array, share: Array, what: str) -> None:
    """Raise if χ² of the numbers of draws is more than six standard deviations above its expectation."""
    expected = share * counts.sum()
    chi2, bound = float(((counts - expected) ** 2 / expected).sum()), len(share) + 6 * (2 * len(share)) ** 0.5
    expect(chi2 < bound, f"χ² below {bound:.0f} for {len(share)} rows after {what}", f"{chi2:.0f}")


def check_duplicates(adapter: Adapter) -> None:
    ranked = Ranked(require(adapter.prioritized_strictly or adapter.prioritized, "prioritized buffer"), 2)
    ranked.set([0, 1, 0], np.array([1e6, 1.0, 1e-6]))
    counts = ranked.counts(400)[0]
    got = f"{counts[0]:.0f} times"
    expect(counts[0] < 40, "row 0, last given 1e-6 beside 1, in fewer than 40 of 400 draws", got)
    size = 64
    ranked = Ranked(require(adapter.prioritized_strictly or adapter.prioritized, "prioritized buffer"), size)
    random = np.random.default_rng(0)
    for _ in range(20):
        ranked.set(random.integers(0, size, 4 * size), random.uniform(0.1, 10, 4 * size))
    ranked.set(np.arange(size), np.ones(size))
    what = "20 updates with every row about four times, and then equal priorities"
    check_share(ranked.counts(100 * size)[0], np.full(size, 1 / size), what)


def check_stale_updates(adapter: Adapter) -> None:
    ranked = Ranked(require(adapter.prioritized_strictly or adapter.prioritized, "prioritized buffer"), 4, more=1)
    ranked.set([0, 1, 2, 3], np.ones(4))
    ranked.probe.sample(4)
    ranked.probe.add_all(ranked.scenario.steps(4, 5))
    # A library may refuse a stale update instead of skipping it.
    with suppress(IndexError):
        ranked.set([0], np.array([1e-6]))
    counts = ranked.counts(400)[0]
    got = f"{counts[4]:.0f} times"
    expect(counts[4] > 40, "row 4, which overwrote row 0 before row 0 was given 1e-6, in about 100 of 400 draws", got)


CASES = (
    Case(
        "T8",
        "importance weights",
        "Importance weights of prioritized draws.",
        "p^(−αβ) up to a factor at any scale, at most 1; 1 for equal priorities, also after a tiny one was replaced",
        check_weights,
    ),
    Case(
        "T9",
        "NaN priority refused",
        "Priorities NaN, ∞, −∞ and −1; and zero, where no constant is added to priorities.",
        "refused, and nothing changes; a row of priority zero is never drawn",
        check_invalid_priorities,
        misuse=True,
    ),
    Case(
        "T10",
        "a million priority updates",
        "A million updates with priorities from 1e-8 to 1e8.",
        "draws and weights follow the final priorities",
        check_a_million_updates,
    ),
    Case(
        "T11",
        "duplicate priorities",
        "The same row twice in one update.",
        "the last priority counts",
        check_duplicates,
    ),
    Case(
        "T12",
        "stale priority skipped",
        "A priority for a row that was overwritten since it was drawn.",
        "skipped: the new row keeps its initial priority",
        check_stale_updates,
    ),
)
