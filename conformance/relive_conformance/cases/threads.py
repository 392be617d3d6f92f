"""T19: concurrent writers and readers."""

from __future__ import annotations

import threading

import numpy as np

from relive_conformance.adapters.off_policy import NotOffered, ReplayBatch
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.outcome import Differs, figures
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import play

ROWS, CAPACITY, READERS = 4_000, 64, 2
PATIENCE = 120.0


def check_whole_rows(adapter: Adapter) -> None:
    scenario = play([(ROWS, "open")])
    replay = require(adapter.replay, "replay buffer")(scenario.shape(CAPACITY))
    if not Probe(replay).promise("safe_in_threads"):
        raise NotOffered("no promise about threads")
    steps = list(scenario.steps())
    Probe(replay).add_all(steps[:CAPACITY])
    errors: list[BaseException] = []
    finished = threading.Event()

    def read() -> None:
        probe = Probe(replay)
        try:
            while not finished.is_set():
                _check(probe.sample(16))
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    try:
        Probe(replay).add_all(steps[CAPACITY:])
    finally:
        finished.set()
    for reader in readers:
        reader.join(PATIENCE)
        if reader.is_alive():
            raise Differs("every call to return", "a call that did not return")
    if errors:
        raise errors[0]


def _check(batch: ReplayBatch) -> None:
    """Raise unless all numbers of a row come from the same x."""
    x = batch.obs[:, 0]
    sources = np.stack([-batch.obs[:, 1], batch.action.reshape(-1) / 2, batch.reward / 3, batch.next_obs[:, 0] - 1], 1)
    torn = (sources != x[:, None]).any(1)
    if torn.any():
        row = int(torn.argmax())
        raise Differs(f"every field of row {x[row]:g}", f"fields of rows {figures(sources[row])}")


CASES = (Case("T19", "no torn row", "One thread writes while others sample.", "no torn row", check_whole_rows),)
