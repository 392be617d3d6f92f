"""Tests of `Counted`, which counts the draws of every row for any sampler."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl


def fill_buffer(rows: int, capacity: int = 100, **options: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(capacity, obs=1, action=(), seed=0, **options)
    for t in range(rows):
        replay.add([float(t)], 0.0, 0.0, terminated=False, truncated=False, next_obs=[t + 1.0])
    return replay


def count_draws(replay: rl.ReplayBuffer) -> dict[int, int]:
    """Return the number of draws of every stored row, by row id."""
    draw_counts, ids = replay.sampler.state()["drawn"], replay.ids()
    return {int(i): int(draw_counts[replay.storage.locate(ids[k : k + 1])]) for k, i in enumerate(ids)}


SAMPLERS = [rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_draw_is_counted_and_changes_nothing_else(sampler: Any, backend: str) -> None:
    plain, replay = fill_buffer(20, sampler=sampler), fill_buffer(20, sampler=rl.Counted(sampler))
    tally: Counter[int] = Counter()
    for _ in range(30):
        expected, batch = plain.sample(7), replay.sample(7)
        assert bool((expected == batch).all())
        tally.update(batch["index"].tolist())
    assert count_draws(replay) == {i: tally[i] for i in range(20)}
    replay.check()


def test_the_count_of_an_overwritten_row_is_forgotten(backend: str) -> None:
    replay = fill_buffer(6, capacity=6, sampler=rl.Counted(rl.WithoutReplacement()))
    replay.sample(6)
    assert set(count_draws(replay).values()) == {1}
    # The ring has seven slots: row 7 is stored in the slot of row 0.
    for t in range(6, 9):
        replay.add([float(t)], 0.0, 0.0, terminated=False, truncated=False, next_obs=[t + 1.0])
        replay.check()
    assert count_draws(replay) == {3: 1, 4: 1, 5: 1, 6: 0, 7: 0, 8: 0}
    replay.clear()
    assert int(replay.sampler.state()["drawn"].sum()) == 0
    replay.check()


def test_priorities_of_the_inner_sampler_are_updated() -> None:
    replay = fill_buffer(9, sampler=rl.Counted(rl.Prioritized(alpha=1.0, eps=0.0)))
    priority = torch.zeros(9)
    priority[5] = 1.0
    replay.update_priority(replay.ids(), priority)
    assert replay.sample(8)["index"].tolist() == [5] * 8
    with pytest.raises(rl.SchemaError, match="update_priority: expected a sampler with priorities"):
        fill_buffer(3, sampler=rl.Counted()).update_priority([0], [1.0])


def test_counts_are_saved_and_loaded(tmp_path: Path) -> None:
    replay = fill_buffer(9, capacity=9, sampler=rl.Counted(rl.Prioritized()))
    for _ in range(5):
        replay.sample(6)
    replay.save(tmp_path)
    assert rl.load(tmp_path, rl.ReplayBuffer).sampler == rl.Counted(rl.Prioritized())
    assert count_draws(rl.load(tmp_path, rl.ReplayBuffer)) == count_draws(replay)


def test_only_a_sampler_that_does_not_count_can_be_counted() -> None:
    for wrong in (rl.Counted(), "uniform"):
        with pytest.raises(rl.SchemaError, match="Counted: expected a sampler whose draws are counted"):
            rl.Counted(wrong)  # pyright: ignore[reportArgumentType]


def test_counts_lie_in_the_memory_that_processes_share() -> None:
    replay = fill_buffer(9, device=rl.Memory.shared(), sampler=rl.Counted(rl.Prioritized()))
    replay.sample(5)
    assert count_draws(rl.connect(replay.handle())) == count_draws(replay)
    assert sum(count_draws(replay).values()) == 5


def test_recovery_sets_the_count_of_a_lost_row_to_zero() -> None:
    replay = fill_buffer(9, sampler=rl.Counted(rl.WithoutReplacement()))
    replay.sample(9)
    ring = replay.storage.rows.ring
    ring.kind[0] = 0
    ring.count -= 1
    replay.sampler.on_recover()  # pyright: ignore[reportAttributeAccessIssue]
    assert replay.sampler.state()["drawn"].tolist()[:3] == [0, 1, 1]
