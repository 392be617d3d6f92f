"""Recent: the newest transitions of every environment, each as likely as any other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.replay.samplers.newest_rows import KINDS, Lived, is_possible, memory_of

ENVS, ROWS, WINDOW = 3, 20, 4


def newest(replay: rl.ReplayBuffer, window: int) -> list[int]:
    """The newest transitions of every environment, counted from the list of all ids."""
    ids = replay.ids().tolist()
    return sorted(i for env in range(ENVS) for i in sorted(j for j in ids if j % ENVS == env)[-window:])


def lived(memory: Any = "cpu", steps: int = 50, sampler: Any = None, **options: Any) -> rl.ReplayBuffer:
    sampler = rl.Recent(WINDOW) if sampler is None else sampler
    replay = rl.ReplayBuffer(ENVS * ROWS, 1, (), num_envs=ENVS, sampler=sampler, device=memory, seed=3, **options)
    world = Lived(replay, 1)
    for t in range(steps):
        world.step(None if t % 3 else np.array([0, 2]))
    return replay


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_them_are_drawn_and_nothing_else(kind: str, tmp_path: Path) -> None:
    if not is_possible(kind):
        pytest.skip("this install has no native core (no compiler)")
    with memory_of(kind, tmp_path) as memory:
        replay = lived(memory, steps=0)
        world = Lived(replay, 5, ends=0.4)
        for t in range(40):
            world.step(None if t % 3 else np.array([1]))
            found = set(replay.sample(200)["index"].tolist())
            expected = newest(replay, WINDOW)
            assert found <= set(expected)
            if t % 10 == 9:
                assert sorted(set(replay.sample(2000)["index"].tolist())) == expected


@pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(4, burn_in=2)])
def test_every_view_reads_around_them(view: Any, backend: str) -> None:
    replay = lived()
    batch = replay.sample(500, view)
    assert set(batch["index"].tolist()) == set(newest(replay, WINDOW))
    assert "weight" not in batch.keys()


def test_each_is_as_likely_as_any_other(backend: str) -> None:
    replay = lived()
    expected = newest(replay, WINDOW)
    drawn = Counter(replay.sample(24_000)["index"].tolist())
    mean = 24_000 / len(expected)
    chi_squared = sum((drawn[i] - mean) ** 2 / mean for i in expected)
    # 11 degrees of freedom; 1 in 100,000 is above 43.
    assert len(expected) == 12
    assert chi_squared < 43, chi_squared


def test_the_rows_of_a_young_buffer_are_as_likely_as_each_other(backend: str) -> None:
    replay = rl.ReplayBuffer(40, 1, (), sampler=rl.Recent(8), seed=0)
    for t in range(3):
        replay.add([float(t)], 0.0, 0.0, False, False, [t + 1.0])
    drawn = Counter(replay.sample(9_000)["index"].tolist())
    assert set(drawn) == {0, 1, 2}
    assert sum((drawn[i] - 3_000) ** 2 / 3_000 for i in drawn) < 23  # 2 degrees of freedom; 1 in 100,000 is above


def test_a_window_larger_than_the_buffer_is_the_whole_buffer(backend: str) -> None:
    replay = lived(sampler=rl.Recent(10**9))
    assert set(replay.sample(5000)["index"].tolist()) == set(replay.ids().tolist())


def test_rows_before_a_clear_are_not_drawn(backend: str) -> None:
    replay = lived()
    replay.clear()
    with pytest.raises(rl.NotReadyError):
        replay.sample(1)
    new = Lived(replay, 9).step()
    assert set(replay.sample(100)["index"].tolist()) == set(new)


def test_where_the_newest_rows_are_withheld_older_ones_are_drawn() -> None:
    replay = rl.ReplayBuffer(40, 1, (), extra={"x": rl.Mutable(())}, sampler=rl.Recent(2), seed=0)
    for t in range(30):
        replay.add([float(t)], 0.0, 0.0, False, False, [t + 1.0], x=0.0)
    ring = replay.storage.rows.ring
    ring.exclude(ring.row_numbers() >= 15)  # as after a loss of power
    replay.storage.rebuild_caches()  # type: ignore[attr-defined]
    replay.check()
    assert set(replay.sample(100)["index"].tolist()) == {13, 14}


def test_unordered_rows_have_newest_ones_too(backend: str) -> None:
    replay = rl.ReplayBuffer(10, 1, (), sampler=rl.Recent(3), next_obs="stored", seed=0)
    for t in range(14):
        replay.add([float(t)], 0.0, 0.0, False, False, [99.0])
    assert set(replay.sample(200)["obs"][:, 0].tolist()) == {11.0, 12.0, 13.0}


@pytest.mark.parametrize("autoreset", ["NEXT_STEP", "SAME_STEP"])
def test_rows_that_hold_only_an_observation_do_not_count(autoreset: str, backend: str) -> None:
    replay = rl.ReplayBuffer(30, 1, (), num_envs=1, sampler=rl.Recent(5), autoreset=autoreset, seed=0)
    ended = np.zeros(1, bool)
    for t in range(30):
        now, end = np.array([[float(t)]]), np.array([t % 2 == 0 and not ended[0]])
        replay.add(now, now[0], now[0], end, np.zeros(1, bool), now + (1 if autoreset == "NEXT_STEP" else 0.5))
        ended = end
    assert set(replay.sample(300)["index"].tolist()) == set(replay.ids().tolist()[-5:])


def test_a_saved_buffer_goes_on_with_the_same_draws(tmp_path: Path, backend: str) -> None:
    replay = lived()
    replay.sample(7)
    replay.save(tmp_path)
    again = rl.load(tmp_path, rl.ReplayBuffer)
    assert again.sampler == rl.Recent(WINDOW)
    for _ in range(5):
        assert torch.equal(again.sample(9)["index"], replay.sample(9)["index"])


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, None])
def test_a_window_is_a_positive_int(wrong: Any) -> None:
    with pytest.raises(rl.SchemaError, match=r"Recent\.window: expected a positive int"):
        rl.Recent(wrong)
