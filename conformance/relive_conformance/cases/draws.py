"""T13, T20, T23: how rows are drawn."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from relive_conformance.adapters.off_policy import ALPHA, NotOffered
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.cases.priorities import Ranked, check_share
from relive_conformance.outcome import Differs, expect
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import Scenario, play

CAPACITY = 40


def check_proportions(adapter: Adapter) -> None:
    make = require(adapter.replay, "replay buffer")
    for pushed, when in ((30, "30 rows in a ring of 40"), (70, "70 rows in a ring of 40")):
        scenario = play([(pushed, "open")])
        probe = Probe(make(scenario.shape(CAPACITY))).add_all(scenario.steps())
        _check_uniform(probe, scenario, when)
        if probe.promise("save") is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "saved")
                probe.verb("save")(path)
                loaded = Probe(make(scenario.shape(CAPACITY)))
                loaded.verb("load")(path)
                # A library that loads fewer rows fails T17, not this case.
                if loaded.stored == probe.stored:
                    _check_uniform(loaded, scenario, f"{when}, saved and loaded")
    try:
        ranked = Ranked(require(adapter.prioritized, "prioritized buffer"), CAPACITY)
    except NotOffered:
        return
    priority = np.linspace(0.5, 5, CAPACITY)
    ranked.set(np.arange(CAPACITY), priority)
    share = priority**ALPHA / (priority**ALPHA).sum()
    check_share(ranked.counts(200 * CAPACITY)[0], share, "priorities from 0.5 to 5")


def _check_uniform(probe: Probe, scenario: Scenario, when: str) -> None:
    stored = min(len(scenario), CAPACITY)
    rows = [t for _, t in scenario.rows_of(probe.draw(200 * stored).obs)]
    counts = np.bincount(rows, minlength=len(scenario))[len(scenario) - stored :]
    check_share(counts, np.full(stored, 1 / stored), when)


def check_seeds(adapter: Adapter) -> None:
    make = require(adapter.replay, "replay buffer")
    scenario = play([(64, "open")])

    def draws(seed: int | None) -> list[float]:
        probe = Probe(make(scenario.shape(64, seed))).add_all(scenario.steps())
        if reason := probe.promise("draws_from"):
            raise NotOffered(reason)
        return [float(x) for _ in range(4) for x in probe.sample(16).obs[:, 0]]

    before = _global_states()
    first = draws(3)
    expect(first == draws(3), "the same draws for the same seed", "different draws")
    expect(first != draws(4), "different draws for different seeds", "the same draws")
    if not Probe(make(scenario.shape(64))).promise("default_seed"):
        expect(draws(None) != draws(None), "two buffers without a seed to draw differently", "the same draws")
    expect(before == _global_states(), "the generators of random, numpy and torch untouched", "one was used")


def _global_states() -> tuple[bytes, ...]:
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 (looked at, not used)
    states = repr(random.getstate()), repr(numpy_state["state"]["key"].tolist()), repr(numpy_state["state"]["pos"])
    return (*(state.encode() for state in states), torch.get_rng_state().numpy().tobytes())


def check_too_little_data(adapter: Adapter) -> None:
    scenario = play([(3, "open")])
    make = require(adapter.replay, "replay buffer")
    try:
        batch = Probe(make(scenario.shape(8))).sample(1)
    except Exception:
        batch = None
    expect(batch is None, "an error from sampling an empty buffer", f"{0 if batch is None else len(batch.obs)} rows")
    if adapter.without_replacement is None:
        return
    probe = Probe(adapter.without_replacement(scenario.shape(8))).add_all(scenario.steps(0, 1))
    if probe.promise("fewer_is_documented"):
        return
    try:
        batch = probe.sample(8)
    except Exception:
        return
    raise Differs("an error from sampling 8 of 1 row without replacement", f"{len(batch.obs)} rows")


CASES = (
    Case(
        "T13",
        "draws in proportion",
        "χ² of uniform and of prioritized draws, before and after the ring wrapped, and after a load.",
        "the frequency of each row matches its probability",
        check_proportions,
    ),
    Case(
        "T20",
        "seeded draws",
        "Draws of two buffers with the same seed, with different seeds, and without a seed.",
        "the seed determines the draws; without one they differ; global generators are untouched",
        check_seeds,
    ),
    Case(
        "T23",
        "too little data refused",
        "Sampling an empty buffer; sampling 8 rows of 1 without replacement.",
        "an error",
        check_too_little_data,
        misuse=True,
    ),
)
