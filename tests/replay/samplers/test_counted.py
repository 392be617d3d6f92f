"""Counted: the draws of every row, beside whatever sampler chooses them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl


def fill(rows: int, capacity: int = 100, **options: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(capacity, obs=1, action=(), seed=0, **options)
    for t in range(rows):
        replay.add([float(t)], 0.0, 0.0, terminated=False, truncated=False, next_obs=[t + 1.0])
    return replay


def counts(replay: rl.ReplayBuffer) -> dict[int, int]:
    """By row id, of the rows that were drawn."""
    drawn, ids = replay.sampler.state()["drawn"], replay.ids()
    return {int(i): int(drawn[replay.storage.locate(ids[k : k + 1])]) for k, i in enumerate(ids)}


SAMPLERS = [rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_draw_is_counted_and_changes_nothing_else(sampler: Any, backend: str) -> None:
    plain, replay = fill(20, sampler=sampler), fill(20, sampler=rl.Counted(sampler))
    tally: Counter[int] = Counter()
    for _ in range(30):
        expected, batch = plain.sample(7), replay.sample(7)
        assert bool((expected == batch).all())
        tally.update(batch["index"].tolist())
    assert counts(replay) == {i: tally[i] for i in range(20)}
    replay.check()


def test_an_overwritten_row_takes_its_count_along(backend: str) -> None:
    replay = fill(6, capacity=6, sampler=rl.Counted(rl.WithoutReplacement()))
    replay.sample(6)
    assert set(counts(replay).values()) == {1}
    for t in range(6, 9):  # a ring of seven: the row 7 comes where the row 0 was
        replay.add([float(t)], 0.0, 0.0, terminated=False, truncated=False, next_obs=[t + 1.0])
        replay.check()
    assert counts(replay) == {3: 1, 4: 1, 5: 1, 6: 0, 7: 0, 8: 0}
    replay.clear()
    assert int(replay.sampler.state()["drawn"].sum()) == 0
    replay.check()


def test_priorities_are_updated_through_it() -> None:
    replay = fill(9, sampler=rl.Counted(rl.Prioritized(alpha=1.0, eps=0.0)))
    priority = torch.zeros(9)
    priority[5] = 1.0
    replay.update_priority(replay.ids(), priority)
    assert replay.sample(8)["index"].tolist() == [5] * 8
    with pytest.raises(rl.SchemaError, match="update_priority: expected a sampler with priorities"):
        fill(3, sampler=rl.Counted()).update_priority([0], [1.0])


def test_counts_go_with_a_checkpoint(tmp_path: Path) -> None:
    replay = fill(9, capacity=9, sampler=rl.Counted(rl.Prioritized()))
    for _ in range(5):
        replay.sample(6)
    replay.save(tmp_path)
    assert rl.load(tmp_path, rl.ReplayBuffer).sampler == rl.Counted(rl.Prioritized())
    assert counts(rl.load(tmp_path, rl.ReplayBuffer)) == counts(replay)


def test_there_is_one_thing_to_count() -> None:
    for wrong in (rl.Counted(), "uniform"):
        with pytest.raises(rl.SchemaError, match="Counted: expected a sampler whose draws are counted"):
            rl.Counted(wrong)  # pyright: ignore[reportArgumentType]


def test_counts_lie_in_the_memory_that_processes_share() -> None:
    replay = fill(9, device=rl.Memory.shared(), sampler=rl.Counted(rl.Prioritized()))
    replay.sample(5)
    assert counts(rl.connect(replay.handle())) == counts(replay)
    assert sum(counts(replay).values()) == 5


def test_a_row_that_a_dead_process_took_along_has_no_count() -> None:
    replay = fill(9, sampler=rl.Counted(rl.WithoutReplacement()))
    replay.sample(9)
    ring = replay.storage.rows.ring
    ring.kind[0] = 0
    ring.count -= 1
    replay.sampler.on_recover()  # pyright: ignore[reportAttributeAccessIssue]
    assert replay.sampler.state()["drawn"].tolist()[:3] == [0, 1, 1]
