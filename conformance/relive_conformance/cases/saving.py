"""T17, T18: a saved buffer comes back, also if the process dies while it saves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from relive_conformance.adapters.off_policy import NotOffered, ReplayShape
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.outcome import expect, expect_equal
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import play, same_transitions

CAPACITY, WRITTEN = 20, 30
DRAWS = 100
KILLS = 3
PATIENCE = 120.0
"""Seconds in which a child imports everything and saves once."""

Maker = Callable[[ReplayShape], Any]


def check_same_draws(adapter: Adapter) -> None:
    _save_and_load(require(adapter.replay, "replay buffer"))
    with suppress(NotOffered):
        _save_and_load(require(adapter.prioritized, "prioritized buffer"))


def _save_and_load(make: Maker) -> None:
    scenario = play([(7, "truncated"), (WRITTEN - 7, "open")])
    probe = Probe(make(scenario.shape(CAPACITY)))
    save = probe.verb("save")
    probe.add_all(scenario.steps())
    batch = probe.sample(8)
    if batch.weight is not None:
        priority = np.linspace(0.5, 4, 8)
        probe.replay.set_priority(probe.replay.handles(probe.native), priority)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "saved")
        save(path)
        loaded = Probe(make(scenario.shape(CAPACITY, seed=99)))
        loaded.verb("load")(path)
        expect(loaded.stored == probe.stored, f"{probe.stored} rows after load", loaded.stored)
        if probe.promise("draws_from"):
            _same_content(probe, loaded)
            return
        before, after = probe.draw(DRAWS), loaded.draw(DRAWS)
        same_transitions(after, scenario)
        expect_equal(f"the next {DRAWS} draws after load", after.obs, before.obs)
        if before.weight is not None:
            expect_equal(f"weights of the next {DRAWS} draws after load", after.weight, before.weight, 1e-5)


def _same_content(probe: Probe, loaded: Probe) -> None:
    """Compare rows and their frequencies: a library that draws from a global generator cannot save it."""
    before, after = probe.draw(100 * CAPACITY), loaded.draw(100 * CAPACITY)
    rows, counts = np.unique(before.obs[:, 0], return_counts=True)
    rows_after, counts_after = np.unique(after.obs[:, 0], return_counts=True)
    expect_equal("rows that are drawn after load", rows_after, rows)
    share, share_after = counts / counts.sum(), counts_after / counts_after.sum()
    expect_equal("how often rows are drawn after load", share_after, share, 0.025)


def check_killed_saves(adapter: Adapter) -> None:
    make = require(adapter.replay, "replay buffer")
    scenario = play([(20_000, "open")])
    shape = scenario.shape(4_000)
    if not Probe(make(shape)).promise("survives_kill"):
        raise NotOffered("no promise about a save that is killed")
    wait = np.random.default_rng(0).uniform(0.0, 0.05, KILLS)
    for seconds in wait:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "saved")
            finished = _kill_during_saves(make, shape, path, float(seconds))
            loaded = Probe(make(shape))
            loaded.verb("load")(path)
            expect(loaded.stored >= finished, f"the {finished} rows of the last finished save", loaded.stored)
            same_transitions(loaded.draw(400), scenario)


def _kill_during_saves(make: Maker, shape: ReplayShape, path: str, seconds: float) -> int:
    """Let a process save again and again, kill it, and return how many rows its last finished save had."""
    # A fork server that has imported the library starts a process at once.
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_server else "spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_save_repeatedly, args=(make, shape, path, there), daemon=True)
    child.start()
    there.close()
    try:
        if not here.poll(PATIENCE):
            raise NotOffered("the process that saves did not start")
        time.sleep(seconds)
    finally:
        if child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)
        child.join()
    finished = 0
    try:
        while here.poll():
            finished = here.recv()
    # The last message of a killed process may be cut off.
    except EOFError:
        pass
    return finished


def _save_repeatedly(make: Maker, shape: ReplayShape, path: str, pipe: Connection) -> None:
    probe = Probe(make(shape))
    for rows, step in enumerate(play([(20_000, "open")]).steps(), 1):
        probe.add(step)
        probe.replay.save(path)
        pipe.send(min(rows, shape.capacity))


CASES = (
    Case(
        "T17",
        "same draws after a load",
        "save, load, and the next 100 draws.",
        "the same rows, priorities and draws",
        check_same_draws,
    ),
    Case(
        "T18",
        "kill during a save",
        "kill −9 in the middle of a save, then load.",
        "a complete buffer, no older than the last finished save",
        check_killed_saves,
    ),
)
