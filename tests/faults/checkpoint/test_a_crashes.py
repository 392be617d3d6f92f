"""A: kills, Ctrl-C and power failures during a save. `load` returns the old checkpoint or the new one, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.checkpoint.saving import save
from tests.checkpoint.traffic import KINDS, digest, equal, fingerprint
from tests.faults.checkpoint import victim
from tests.faults.checkpoint.disk import (
    RecordedSave,
    after_power_loss,
    count_operations,
    is_one_of,
    load_and_change,
    load_digest,
    read_state,
    save_old_checkpoint,
    watch_files,
    write_state,
)
from tests.faults.processes import CONTEXT, killed, loaded_apart
from tests.tiers import select
from tests.totals import SEED, tell, trials


def kill_saves(path: Path, count: int, seed: int) -> None:
    """A1: kill saves of all kinds of buffers at file operations, spread over all of them."""
    rng, phases, outcomes = random.Random(seed), Counter[str](), Counter[str]()
    known: dict[str, Any] = {}
    for kind in KINDS:
        root = path / kind
        save_old_checkpoint(kind, root)
        operations = count_operations(kind, root, path / "count")
        known[kind] = root, fingerprint(rl.load(root)), fingerprint(load_and_change(kind, root)), operations
    for trial in range(count):
        kind = list(KINDS)[trial % len(KINDS)]
        template, old, new, operations = known[kind]
        turn, turns = trial // len(KINDS), -(-count // len(KINDS))
        point = int((turn + rng.random()) * len(operations) / turns)
        root = path / "trial"
        shutil.copytree(template, root)
        assert killed(victim.save_until, kind, root, point), (kind, point)
        phases[operations[point]] += 1
        found = loaded_apart(root)
        assert found in (old, new), f"seed {seed}: {kind} killed at operation {point}"
        outcomes["the new" if found == new else "the old"] += 1
        again = load_and_change(kind, root)
        again.save(root)
        assert equal(load_digest(root), digest(again))
        shutil.rmtree(root)
    tell(f"A1: {count} kills at operations {dict(phases)}, loaded in a new process {dict(outcomes)}, seed {seed}")
    assert len(phases) >= 5
    assert len(outcomes) == 2


@pytest.mark.promise("A1")
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
        save_old_checkpoint(kind, root)
        template = path / f"template{trial}"
        shutil.copytree(root, template)
        process: Any = CONTEXT.Process(target=victim.save_until_killed, args=(kind, root, ready))
        process.start()
        while not ready.exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        number = max(int(name.stem) for name in (root / "manifests").iterdir())
        numbers.append(number - 2)
        assert loaded_apart(root) == fingerprint(load_and_change(kind, template, number - 2)), f"seed {seed}: {kind}"
        shutil.rmtree(root)
        shutil.rmtree(template)
    tell(f"A1: {count} kills at random times, after {numbers[:20]}… saves, seed {seed}")


@pytest.mark.promise("A1")
def test_a_kill_at_a_random_time_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_at_random_times(tmp_path, trials("A1_TIMES", 16), SEED)


def kill_first_saves(path: Path, count: int, seed: int) -> None:
    rng, outcomes, new, operations = random.Random(seed), Counter[str](), {}, {}
    for kind in KINDS:
        names: list[str] = []
        buffer = lived(kind)
        save(buffer, path / kind, files=watch_files(lambda name, *_, names=names: names.append(name)))
        new[kind], operations[kind] = fingerprint(buffer), len(names)
    for trial in range(count):
        kind, root = list(KINDS)[trial % len(KINDS)], path / f"first{trial}"
        point = int((trial + rng.random()) * operations[kind] / count)
        assert killed(victim.save_first, kind, root, point)
        found = loaded_apart(root)
        assert found in (None, new[kind]), f"seed {seed}: {kind} killed at {point}"
        outcomes["none" if found is None else "new"] += 1
        shutil.rmtree(root, ignore_errors=True)
    tell(f"A2: {count} kills of first saves, {dict(outcomes)}, seed {seed}")
    assert outcomes["none"]
    assert outcomes["new"]


@pytest.mark.promise("A2")
def test_a_kill_during_the_first_save_leaves_nothing_or_the_new(tmp_path: Path) -> None:
    kill_first_saves(tmp_path, trials("A2", 20), SEED)


@pytest.mark.long
def test_many_kills_during_first_saves_leave_nothing_or_the_new(tmp_path: Path) -> None:
    kill_first_saves(tmp_path, trials("A2_LONG", 3_000), SEED)


def interrupt_saves(path: Path, count: int, seed: int) -> None:
    # Background jobs of a shell ignore SIGINT, and so would this test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng, interrupted = random.Random(seed), 0
    for trial in range(count):
        kind, root = list(KINDS)[trial % len(KINDS)], path / f"{trial}"
        old = save_old_checkpoint(kind, root)
        operations = count_operations(kind, root, path / "count")
        point = int((trial + rng.random()) * len(operations) / count)
        buffer = load_and_change(kind, root)
        new = digest(buffer)

        def stop(_: str, n: int, __: Any, point: int = point) -> None:
            if n == point:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            save(buffer, root, files=watch_files(stop))
        interrupted += 1
        assert is_one_of(load_digest(root), old, new), f"seed {seed}: {kind} at {point}"
        assert equal(digest(buffer), new)
        KINDS[kind].act(buffer, 50)
        buffer.save(root)
        assert equal(load_digest(root), digest(buffer))
        shutil.rmtree(root)
    tell(f"A3: {interrupted} interrupts, seed {seed}")


@pytest.mark.promise("A3")
def test_ctrl_c_during_a_save_leaves_the_old_or_the_new_and_a_buffer_that_works(tmp_path: Path) -> None:
    interrupt_saves(tmp_path, trials("A3", 20), SEED)


@pytest.mark.long
def test_many_interrupts_leave_the_old_or_the_new(tmp_path: Path) -> None:
    interrupt_saves(tmp_path, trials("A3_LONG", 3_000), SEED)


def lose_power(path: Path, kind: str, states: int, seed: int, *, first: bool = False) -> tuple[int, int]:
    """A5: fail the power during a later save or the first; return the numbers of prefixes and of distinct states."""
    rng, root = random.Random(seed), path / "root"
    old = None if first else save_old_checkpoint(kind, root)
    start = read_state(root)
    buffer, recorded = lived(kind) if first else load_and_change(kind, root), RecordedSave()
    save(buffer, root, files=recorded.files)
    new, tried = digest(buffer), set[int]()
    committed = next(n for n, entry in enumerate(recorded.log) if entry[0] == "sync_folder" and entry[2] == "manifests")
    for prefix in range(len(recorded.log) + 1):
        for _ in range(states):
            state = after_power_loss(start, recorded.log[:prefix], rng)
            key = hash((prefix > committed, repr(sorted((folder, sorted(state[folder].items())) for folder in state))))
            if key in tried:
                continue
            tried.add(key)
            write_state(state, path / "state")
            try:
                found = load_digest(path / "state")
            except rl.NoCheckpoint:
                found = None
            expected = (new,) if prefix > committed else (old, new)
            assert is_one_of(found, *expected), f"seed {seed}: {kind}, power lost after {recorded.log[prefix - 1][:1]}"
            if len(tried) % 8 == 0:
                # The save may warn that the surviving checkpoint belongs to another buffer.
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "save to .* checkpoints of another buffer")
                    buffer.save(path / "state")
                assert equal(load_digest(path / "state"), new), f"seed {seed}: {kind}, a save after {prefix} operations"
    return len(recorded.log) + 1, len(tried)


def lived(kind: str) -> Any:
    buffer = KINDS[kind].make()
    for n in range(17):
        KINDS[kind].act(buffer, n)
    return buffer


def lose_power_in_both_saves(path: Path, kind: str, states: int) -> None:
    for first in (False, True):
        prefixes, found = lose_power(path / f"{first}", kind, states, SEED, first=first)
        what = "the first save" if first else "a save over another"
        tell(f"A5: {kind}, {what}, {prefixes} prefixes × {states}, {found} different states, seed {SEED}")
        assert found >= 2 * prefixes, "too little was lost: the model disk is too kind"


@pytest.mark.promise("A5")
@pytest.mark.parametrize("kind", select("prioritized", of=KINDS))
def test_a_power_failure_leaves_the_old_or_the_new_and_after_save_the_new(kind: str, tmp_path: Path) -> None:
    lose_power_in_both_saves(tmp_path, kind, trials("A5", 16))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_power_failures(kind: str, tmp_path: Path) -> None:
    lose_power_in_both_saves(tmp_path, kind, trials("A5_LONG", 1_000))


def test_the_folders_above_a_new_root_are_synchronised_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised = set[str]()
    fsync = os.fsync

    def noted(file: int) -> None:
        synchronised.add(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    lived("uniform").save(tmp_path / "a" / "b" / "root")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= synchronised
