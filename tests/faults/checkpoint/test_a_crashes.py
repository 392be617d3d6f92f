"""A: the process dies, Ctrl-C, the power fails. What is loaded is the old checkpoint or the new one, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import recollect as rc
from recollect.checkpoint.saving import save
from tests.checkpoint.traffic import KINDS, digest, equal
from tests.faults.checkpoint import victim
from tests.faults.checkpoint.disk import (
    SEED,
    Recorded,
    after_power_loss,
    before,
    build,
    count_operations,
    gone_on,
    loaded,
    old_checkpoint,
    one_of,
    state_of,
    trials,
)

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.faults.checkpoint.victim"])


def killed(target: Any, *arguments: Any) -> bool:
    """Run a victim to its end, and say whether it was killed."""
    process: Any = _processes.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def kill_saves(path: Path, count: int, seed: int) -> None:
    """A1, at operations: spread over all of them, for all kinds."""
    rng, phases = random.Random(seed), Counter[str]()
    known: dict[str, Any] = {}
    for kind in KINDS:
        root = path / kind
        old = old_checkpoint(kind, root)
        operations = count_operations(kind, root, path / "count")
        known[kind] = root, old, digest(gone_on(kind, root)), operations
    for trial in range(count):
        kind = list(KINDS)[trial % len(KINDS)]
        template, old, new, operations = known[kind]
        turn, turns = trial // len(KINDS), -(-count // len(KINDS))
        point = int((turn + rng.random()) * len(operations) / turns)
        root = path / "trial"
        shutil.copytree(template, root)
        assert killed(victim.save_until, kind, root, point), (kind, point)
        phases[operations[point]] += 1
        assert one_of(loaded(root), old, new), f"seed {seed}: {kind} killed at operation {point}"
        again = gone_on(kind, root)
        again.save(root)
        assert equal(loaded(root), digest(again))
        shutil.rmtree(root)
    print(f"A1: {count} kills at operations {dict(phases)}, seed {seed}")  # noqa: T201
    assert len(phases) >= 5


def test_a_kill_during_a_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    kill_saves(tmp_path, trials("A1", 44), SEED)


@pytest.mark.long
def test_many_kills_during_saves_leave_the_old_or_the_new(tmp_path: Path) -> None:
    kill_saves(tmp_path / "points", trials("A1_LONG", 9_000), SEED)
    kill_at_random_times(tmp_path / "times", trials("A1_LONG_TIMES", 1_000), SEED)


def kill_at_random_times(path: Path, count: int, seed: int) -> None:
    rng, numbers = random.Random(seed), []
    for trial in range(count):
        kind, root, ready = list(KINDS)[trial % len(KINDS)], path / f"{trial}", path / f"ready{trial}"
        old_checkpoint(kind, root)
        template = path / f"template{trial}"
        shutil.copytree(root, template)
        process: Any = _processes.Process(target=victim.save_for_ever, args=(kind, root, ready))
        process.start()
        while not ready.exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        number = max(int(name.stem) for name in (root / "manifests").iterdir())
        numbers.append(number - 2)
        assert equal(loaded(root), digest(gone_on(kind, template, number - 2))), f"seed {seed}: {kind}"
    print(f"A1: {count} kills at random times, after {numbers[:20]}… saves, seed {seed}")  # noqa: T201


def test_a_kill_at_a_random_time_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_at_random_times(tmp_path, trials("A1_TIMES", 16), SEED)


def kill_first_saves(path: Path, count: int, seed: int) -> None:
    rng, outcomes, new, operations = random.Random(seed), Counter[str](), {}, {}
    for kind in KINDS:
        names: list[str] = []
        buffer = KINDS[kind].make()
        for n in range(17):
            KINDS[kind].act(buffer, n)
        save(buffer, path / kind, files=before(lambda name, *_, names=names: names.append(name)))
        new[kind], operations[kind] = digest(buffer), len(names)
    for trial in range(count):
        kind, root = list(KINDS)[trial % len(KINDS)], path / f"first{trial}"
        point = int((trial + rng.random()) * operations[kind] / count)
        assert killed(victim.save_first, kind, root, point)
        try:
            found = loaded(root)
        except rc.NoCheckpoint:
            outcomes["none"] += 1
        else:
            outcomes["new"] += 1
            assert equal(found, new[kind]), f"seed {seed}: {kind} killed at {point}"
    print(f"A2: {count} kills of first saves, {dict(outcomes)}, seed {seed}")  # noqa: T201
    assert outcomes["none"]
    assert outcomes["new"]


def test_a_kill_during_the_first_save_leaves_nothing_or_the_new(tmp_path: Path) -> None:
    kill_first_saves(tmp_path, trials("A2", 20), SEED)


@pytest.mark.long
def test_many_kills_during_first_saves_leave_nothing_or_the_new(tmp_path: Path) -> None:
    kill_first_saves(tmp_path, trials("A2_LONG", 3_000), SEED)


def interrupt_saves(path: Path, count: int, seed: int) -> None:
    rng, interrupted = random.Random(seed), 0
    for trial in range(count):
        kind, root = list(KINDS)[trial % len(KINDS)], path / f"{trial}"
        old = old_checkpoint(kind, root)
        operations = count_operations(kind, root, path / "count")
        point = int((trial + rng.random()) * len(operations) / count)
        buffer = gone_on(kind, root)
        new = digest(buffer)

        def stop(_: str, n: int, __: Any, point: int = point) -> None:
            if n == point:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            save(buffer, root, files=before(stop))
        interrupted += 1
        assert one_of(loaded(root), old, new), f"seed {seed}: {kind} at {point}"
        assert equal(digest(buffer), new)
        KINDS[kind].act(buffer, 50)
        buffer.save(root)
        assert equal(loaded(root), digest(buffer))
    print(f"A3: {interrupted} interrupts, seed {seed}")  # noqa: T201


def test_ctrl_c_during_a_save_leaves_the_old_or_the_new_and_a_buffer_that_works(tmp_path: Path) -> None:
    interrupt_saves(tmp_path, trials("A3", 20), SEED)


@pytest.mark.long
def test_many_interrupts_leave_the_old_or_the_new(tmp_path: Path) -> None:
    interrupt_saves(tmp_path, trials("A3_LONG", 3_000), SEED)


def lose_power(path: Path, kind: str, states: int, seed: int) -> tuple[int, int]:
    """A5 for one kind; returns how many prefixes and how many different states."""
    rng = random.Random(seed)
    root = path / "root"
    old = old_checkpoint(kind, root)
    start = state_of(root)
    buffer, recorded = gone_on(kind, root), Recorded()
    save(buffer, root, files=recorded.files)
    new, tried = digest(buffer), set[int]()
    committed = next(n for n, entry in enumerate(recorded.log) if entry[0] == "sync_folder" and entry[2] == "manifests")
    for prefix in range(len(recorded.log) + 1):
        for _ in range(states):
            state = after_power_loss(start, recorded.log[:prefix], rng)
            key = hash((prefix > committed, repr({folder: state[folder] for folder in state if folder != "tmp"})))
            if key in tried:
                continue
            tried.add(key)
            build(state, path / "state")
            found = loaded(path / "state")
            expected = (new,) if prefix > committed else (old, new)
            assert one_of(found, *expected), f"seed {seed}: {kind}, power lost after {recorded.log[prefix - 1][:1]}"
    return len(recorded.log) + 1, len(tried)


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_failure_leaves_the_old_or_the_new_and_after_save_the_new(kind: str, tmp_path: Path) -> None:
    prefixes, states = lose_power(tmp_path, kind, trials("A5", 16), SEED)
    print(f"A5: {kind}, {prefixes} prefixes × 16, {states} different states, seed {SEED}")  # noqa: T201
    assert states >= 5, "nothing was lost: the model disk is too kind"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_power_failures(kind: str, tmp_path: Path) -> None:
    print(lose_power(tmp_path, kind, trials("A5_LONG", 1_000), SEED))  # noqa: T201
