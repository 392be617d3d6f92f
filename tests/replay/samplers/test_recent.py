"""Tests of `Recent`, which draws the newest transitions of every environment with equal probability."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.replay.samplers.newest_rows import RandomEpisodes

ENVS, ROWS, WINDOW = 3, 20, 4


def newest_ids(replay: rl.ReplayBuffer, window: int) -> list[int]:
    """Return the ids of the newest `window` transitions of every environment."""
    ids = replay.ids().tolist()
    return sorted(i for env in range(ENVS) for i in sorted(j for j in ids if j % ENVS == env)[-window:])


def make_buffer(memory: Any = "cpu", steps: int = 50, sampler: Any = None, **options: Any) -> rl.ReplayBuffer:
    sampler = rl.Recent(WINDOW) if sampler is None else sampler
    replay = rl.ReplayBuffer(ENVS * ROWS, 1, (), num_envs=ENVS, sampler=sampler, device=memory, seed=3, **options)
    episodes = RandomEpisodes(replay, 1)
    for t in range(steps):
        episodes.step(None if t % 3 else np.array([0, 2]))
    return replay


def test_exactly_the_newest_rows_are_drawn(memory: Any) -> None:
    replay = make_buffer(memory, steps=0)
    episodes = RandomEpisodes(replay, 5, ends=0.4)
    for t in range(40):
        episodes.step(None if t % 3 else np.array([1]))
        sampled_ids = set(replay.sample(200)["index"].tolist())
        expected = newest_ids(replay, WINDOW)
        assert sampled_ids <= set(expected)
        if t % 10 == 9:
            assert sorted(set(replay.sample(2000)["index"].tolist())) == expected


@pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(4, burn_in=2)])
def test_every_view_reads_the_newest_rows(view: Any, backend: str) -> None:
    replay = make_buffer()
    batch = replay.sample(500, view)
    assert set(batch["index"].tolist()) == set(newest_ids(replay, WINDOW))
    assert "weight" not in batch.keys()


def test_the_newest_rows_are_drawn_with_equal_probability(backend: str) -> None:
    replay = make_buffer()
    expected = newest_ids(replay, WINDOW)
    drawn = Counter(replay.sample(24_000)["index"].tolist())
    mean = 24_000 / len(expected)
    chi_squared = sum((drawn[i] - mean) ** 2 / mean for i in expected)
    # With 11 degrees of freedom, χ² is above 43 in 1 of 100,000 cases.
    assert len(expected) == 12
    assert chi_squared < 43, chi_squared


def test_the_rows_of_a_young_buffer_are_as_likely_as_each_other(backend: str) -> None:
    replay = rl.ReplayBuffer(40, 1, (), sampler=rl.Recent(8), seed=0)
    for t in range(3):
        replay.add([float(t)], 0.0, 0.0, False, False, [t + 1.0])
    drawn = Counter(replay.sample(9_000)["index"].tolist())
    assert set(drawn) == {0, 1, 2}
    # With 2 degrees of freedom, χ² is above 23 in 1 of 100,000 cases.
    assert sum((drawn[i] - 3_000) ** 2 / 3_000 for i in drawn) < 23


def test_a_window_larger_than_the_buffer_is_the_whole_buffer(backend: str) -> None:
    replay = make_buffer(sampler=rl.Recent(10**9))
    assert set(replay.sample(5000)["index"].tolist()) == set(replay.ids().tolist())


def test_rows_before_a_clear_are_not_drawn(backend: str) -> None:
    replay = make_buffer()
    replay.clear()
    with pytest.raises(rl.NotReadyError):
        replay.sample(1)
    new_ids = RandomEpisodes(replay, 9).step()
    assert set(replay.sample(100)["index"].tolist()) == set(new_ids)


def test_older_rows_are_drawn_if_the_newest_are_excluded() -> None:
    replay = rl.ReplayBuffer(40, 1, (), extra={"x": rl.Mutable(())}, sampler=rl.Recent(2), seed=0)
    for t in range(30):
        replay.add([float(t)], 0.0, 0.0, False, False, [t + 1.0], x=0.0)
    ring = replay.storage.rows.ring
    # A loss of power has the same effect.
    ring.exclude_rows(ring.row_numbers() >= 15)
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
    replay = make_buffer()
    replay.sample(7)
    replay.save(tmp_path)
    loaded = rl.load(tmp_path, rl.ReplayBuffer)
    assert loaded.sampler == rl.Recent(WINDOW)
    for _ in range(5):
        assert torch.equal(loaded.sample(9)["index"], replay.sample(9)["index"])


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, None])
def test_a_window_is_a_positive_int(wrong: Any) -> None:
    with pytest.raises(rl.SchemaError, match=r"Recent\.window: expected a positive int"):
        rl.Recent(wrong)
