"""NewFirst: every new row is shown once, soon, and oldest first; the rest of a batch is uniform."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.concurrent import Handle
from tests.faults.processes import apart
from tests.replay.samplers.newest_rows import KINDS, Lived, is_possible, memory_of

ENVS, ROWS = 3, 30


def made(memory: Any = "cpu", sampler: Any = None, rows: int = ROWS, **options: Any) -> rl.ReplayBuffer:
    sampler = rl.NewFirst(0.5) if sampler is None else sampler
    return rl.ReplayBuffer(ENVS * rows, 1, (), num_envs=ENVS, sampler=sampler, device=memory, seed=3, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_new_row_is_shown_once_and_oldest_first(kind: str, tmp_path: Path) -> None:
    if not is_possible(kind):
        pytest.skip("this install has no native core (no compiler)")
    with memory_of(kind, tmp_path) as memory:
        replay = made(memory)
        world, waiting = Lived(replay, 1), {env: [] for env in range(ENVS)}
        for t in range(60):
            for row in world.step(None if t % 3 else np.array([0, 2])):
                waiting[row % ENVS].append(row)
            batch = replay.sample(5)["index"].tolist()
            assert len(batch) == 5
            for row in expected_shown(waiting, batch[:3]):  # half of five, rounded up
                waiting[row % ENVS].remove(row)
            replay.check()
        for _ in range(5):
            replay.sample(50)
        assert not new_in(replay, 50)


def expected_shown(waiting: dict[int, list[int]], first: list[int]) -> list[int]:
    """The rows that were to be shown, which are the first of the batch."""
    due = min(3, sum(map(len, waiting.values())))
    shown = first[:due]
    for row in shown:
        rows = waiting[row % ENVS]
        place = rows.index(row)
        assert all(earlier in shown for earlier in rows[:place]), f"{row} is shown before {rows[:place]}"
    assert len(set(shown)) == due
    return shown


def new_in(replay: rl.ReplayBuffer, count: int) -> bool:
    """Whether a draw shows anything new."""
    before = replay.sampler.state()["shown"].clone()
    replay.sample(count)
    return not torch.equal(before, replay.sampler.state()["shown"])


def test_the_rest_of_a_batch_is_uniform(backend: str) -> None:
    replay = made(sampler=rl.NewFirst(0.25), rows=5)
    world = Lived(replay, 2, ends=0.3)
    for _ in range(12):
        world.step()
    while new_in(replay, 8):
        pass
    ids = replay.ids().tolist()
    drawn = Counter(replay.sample(30_000)["index"].tolist())
    mean = 30_000 / len(ids)
    chi_squared = sum((drawn[i] - mean) ** 2 / mean for i in ids)
    assert set(drawn) == set(ids)
    assert chi_squared < 50, (chi_squared, len(ids))  # at most 14 degrees of freedom; 1 in 100,000 is above 48


@pytest.mark.parametrize(("share", "count", "most"), [(0.5, 8, 4), (0.25, 8, 2), (1.0, 8, 8), (0.1, 1, 1), (0.3, 4, 2)])
def test_no_more_than_its_share_of_a_batch_is_new(share: float, count: int, most: int, backend: str) -> None:
    replay = made(sampler=rl.NewFirst(share))
    world = Lived(replay, 2, ends=0.0)
    for _ in range(20):
        world.step()
    replay.sample(count)
    assert int(replay.sampler.state()["shown"].sum()) == most


def test_rows_that_were_overwritten_before_their_turn_are_not_shown(backend: str) -> None:
    replay = made(sampler=rl.NewFirst(0.5), rows=4)
    world = Lived(replay, 2, ends=0.0)
    for _ in range(11):
        world.step()
    batch = replay.sample(24)["index"].tolist()
    assert sorted(batch[:12]) == replay.ids().tolist()
    assert not new_in(replay, 24)


@pytest.mark.filterwarnings("ignore:obs. expected steps that start where")  # its steps jump on purpose
@pytest.mark.parametrize("autoreset", [None, "NEXT_STEP"])
def test_with_a_length_every_new_step_is_shown_once(autoreset: Any, backend: str) -> None:
    length = 4
    replay = made(sampler=rl.NewFirst(1.0, length=length), rows=60, autoreset=autoreset)
    world, seen, written = Lived(replay, 7, ends=0.15), Counter[int](), set[int]()
    for t in range(50):
        written |= set(world.step(None if t % 4 else np.array([1])))
        while (shown := shown_sequence(replay, length)) is not None:
            steps, ended = shown
            assert len(steps) == length or ended, "a sequence that goes on is shown"
            seen.update(steps)
    assert max(seen.values()) == 1
    assert set(seen) <= written
    for env in range(ENVS):
        rows = sorted(row for row in written if row % ENVS == env)
        waiting = [row for row in rows if row not in seen]
        assert waiting == rows[len(rows) - len(waiting) :], "a step was passed over"
        assert len(waiting) < length + 1  # the last steps of an episode that goes on


def shown_sequence(replay: rl.ReplayBuffer, length: int) -> tuple[list[int], bool] | None:
    """The steps of a sequence that is new, and whether its episode ended with it; None if nothing new is there."""
    before = replay.sampler.state()["shown"].clone()
    batch = replay.sample(1, rl.Sequence(length, step_index=True))
    if torch.equal(replay.sampler.state()["shown"], before):
        return None
    mask = batch["mask"][0]
    return batch["step_index"][0][mask].tolist(), bool(batch["terminated"][0][mask][-1])


def test_a_batch_that_cannot_be_made_has_shown_nothing() -> None:
    replay = made()
    Lived(replay, 1).step()
    before = replay.sampler.state()["shown"].clone()
    with pytest.raises(rl.SchemaError, match="^out"):
        replay.sample(4, out=replay.read(replay.ids()[:1]))
    assert torch.equal(replay.sampler.state()["shown"], before)
    assert new_in(replay, 4)


def test_a_saved_buffer_goes_on_exactly(tmp_path: Path, backend: str) -> None:
    replay = made()
    world = Lived(replay, 1)
    for _ in range(20):
        world.step()
    replay.sample(9)
    replay.save(tmp_path)
    again = rl.load(tmp_path, rl.ReplayBuffer)
    assert again.sampler == rl.NewFirst(0.5)
    for _ in range(12):
        assert torch.equal(again.sample(9)["index"], replay.sample(9)["index"])
    again.check()


def test_disk_memory_remembers_what_was_shown(tmp_path: Path) -> None:
    replay = made(rl.Memory.disk(tmp_path / "memory"))
    world = Lived(replay, 1)
    for _ in range(10):
        world.step()
    while new_in(replay, 8):
        pass
    shown = replay.sampler.state()["shown"].clone()
    replay.close()
    with rl.load(tmp_path / "memory", rl.ReplayBuffer) as again:
        assert torch.equal(again.sampler.state()["shown"], shown)
        assert not new_in(again, 8)


def shown_by(handle: Handle, count: int) -> list[int]:
    return rl.connect(handle).sample(count)["index"].tolist()[: count // 2]


def test_processes_show_each_row_once_together() -> None:
    replay = made(rl.Memory.shared())
    world = Lived(replay, 1, ends=0.0)
    for _ in range(8):
        world.step()
    here = replay.sample(16)["index"].tolist()[:8]
    there = apart(shown_by, replay.handle(), 16)
    again = replay.sample(16)["index"].tolist()[:8]
    assert sorted(here + there + again) == replay.ids().tolist()


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in (0, -0.5, 1.5, True, "half", float("nan")):
        with pytest.raises(rl.SchemaError, match=r"NewFirst\.share: expected a number in \(0, 1\]"):
            rl.NewFirst(wrong)  # type: ignore[arg-type]
    with pytest.raises(rl.SchemaError, match=r"NewFirst\.length: expected a positive int"):
        rl.NewFirst(length=0)
    with pytest.raises(rl.SchemaError, match="NewFirst: expected rows in time order"):
        made(sampler=rl.NewFirst(length=2), next_obs="stored")


def test_a_saved_state_that_cannot_be_is_refused() -> None:
    replay = made()
    Lived(replay, 1).step()
    for wrong in (torch.full((ENVS,), 99), torch.full((ENVS,), -1), torch.zeros(ENVS + 1, dtype=torch.int64)):
        state = replay.state_dict()
        state["arrays"] = {**state["arrays"], "sampler.shown": wrong}
        with pytest.raises(rl.SchemaError, match="sampler: expected the state of a sampler"):
            made().load_state_dict(state)
