"""A power failure after rows on disk were rewritten: a row is old, new, or never sampled again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import relive as rl
from relive.replay.native_backend import NativeBackend
from tests.checkpoint.traffic import digest, equal
from tests.faults.disk.test_power import Machine, other_boot  # noqa: F401 (a fixture)
from tests.totals import SEED, tell, trials

ENVS, ROWS, WIDTH, REACH = 2, 60, 200, 8
FALSE = np.zeros(ENVS, bool)


class Traffic:
    """Adds and rewrites rows, and records every value that a row ever had."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        extra = {"wide": rl.Mutable(rl.Field(WIDTH, torch.int64)), "mark": rl.Mutable(rl.Field((), torch.int64))}
        memory = rl.Memory.disk(root, commit_every=REACH)
        self.replay = rl.ReplayBuffer(ENVS * ROWS, 1, (), num_envs=ENVS, extra=extra, device=memory)
        self.rng, self.clock = rng, 0
        self.values: dict[int, set[int]] = {}
        self.since: set[int] = set()
        """Rows rewritten since the last commit."""

    def step(self) -> None:
        number = self.clock * ENVS + np.arange(ENVS)
        number_of_commit = self.replay._allocator._number  # type: ignore[union-attr]
        obs = number[:, None] * 1.0
        wide = np.repeat(number[:, None], WIDTH, 1)
        self.replay.add(obs, obs[:, 0], obs[:, 0], FALSE, FALSE, obs + ENVS, wide=wide, mark=number)
        if self.replay._allocator._number != number_of_commit:  # type: ignore[union-attr]
            self.since.clear()
        self.values |= {int(n): {int(n)} for n in number}
        self.clock += 1

    def write(self) -> None:
        ids = self.replay.ids()
        chosen = ids[torch.tensor(self.rng.choices(range(len(ids)), k=5))].unique()
        value = self.rng.randrange(1 << 40)
        for row in chosen.tolist():
            self.values[row].add(value)
            self.since.add(row)
        marks = torch.full((len(chosen),), value)
        assert self.replay.write(chosen, mark=marks, wide=marks.unsqueeze(1).expand(-1, WIDTH)) == 0


def verify(replay: rl.ReplayBuffer, traffic: Traffic) -> int:
    """Assert that every row is exact, and return the number of rows that are missing between others."""
    replay.check()
    rows = replay[replay.ids()]
    ids = rows["index"].tolist()
    assert rows["obs"][:, 0].tolist() == ids
    assert rows["next_obs"][:, 0].tolist() == [row + ENVS for row in ids]
    assert bool((rows["wide"] == rows["mark"].unsqueeze(1)).all()), "a torn row"
    for row, mark in zip(ids, rows["mark"].tolist(), strict=True):
        assert mark in traffic.values[row], f"row {row} never was {mark}"
    withheld = 0
    for env in range(ENVS):
        own = [row for row in ids if row % ENVS == env]
        missing = set(range(min(own), max(own), ENVS)) - set(own) if own else set()
        assert missing <= traffic.since, "a row is missing that nobody has written since the commit"
        withheld += len(missing)
    steps = replay.sample(8, rl.Sequence(5, burn_in=2)) if ids else None
    if steps is not None:
        assert bool((steps["obs"][steps["mask"]][:, 0] + ENVS == steps["next_obs"][steps["mask"]][:, 0]).all())
    return withheld


def lose_power(path: Path, machine: Machine, rng: random.Random) -> tuple[int, int]:
    traffic, withheld, left = Traffic(path / "memory", rng), 0, 0
    for turn in range(rng.randrange(20, 100)):
        traffic.step()
        if turn > 8 and rng.random() < 0.5:
            traffic.write()
        if rng.random() < 0.05:
            traffic.replay.commit()
            traffic.since.clear()
    found = path / "found"
    machine.after(path / "memory", found, rng)
    with rl.load(found, rl.ReplayBuffer) as again:
        withheld, left = verify(again, traffic), len(again)
        once = digest(again)
    assert equal(digest(rl.load(found)), once)
    del traffic
    for folder in ("memory", "found"):
        shutil.rmtree(path / folder)
    return withheld, left


@pytest.mark.promise("A7")
@pytest.mark.usefixtures("other_boot")
def test_a_power_failure_leaves_no_torn_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, rng, withheld, left = trials("WRITE_BACK_POWER", 10), random.Random(SEED), 0, 0
    for _ in range(count):
        more = lose_power(tmp_path, Machine(monkeypatch), rng)
        withheld, left = withheld + more[0], left + more[1]
    tell(
        f"A7: {count} losses of power after write-backs, {left} rows found, {withheld} withheld, none torn, seed {SEED}"
    )
    assert withheld
    assert left > 20 * count


@pytest.mark.thorough
@pytest.mark.usefixtures("other_boot")
def test_torn_rows_without_checksums_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary: without checksums of mutable fields, torn rows are returned."""
    machine, rng = Machine(monkeypatch), random.Random(SEED)
    monkeypatch.setattr(NativeBackend, "find_torn_rows", lambda store: torch.zeros_like(store.rows.ring.first))
    for trial in range(40):
        (tmp_path / str(trial)).mkdir()
        try:
            lose_power(tmp_path / str(trial), machine, rng)
        except AssertionError as error:
            if "a torn row" in str(error) or "never was" in str(error):
                return
            raise
    pytest.fail("nothing was noticed")
