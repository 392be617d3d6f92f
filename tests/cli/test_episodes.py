"""Episode counting of the demo."""

import math

import numpy as np

from recollect.cli.demo.curve import trailing_mean
from recollect.cli.demo.episodes import Episode, Episodes


def step(episodes: Episodes, reward: list[float], terminated: list[int], truncated: list[int]) -> None:
    episodes.update(np.array(reward), np.array(terminated, dtype=bool), np.array(truncated, dtype=bool))


def test_returns_and_lengths_of_two_environments_that_end_differently() -> None:
    episodes = Episodes(num_envs=2, window=2)
    assert math.isnan(episodes.mean_return)
    assert math.isnan(episodes.mean_length)
    step(episodes, [1, 10], [0, 0], [0, 0])
    step(episodes, [2, 20], [1, 0], [0, 0])
    assert episodes.finished == [Episode(step=4, return_=3, length=2)]
    assert not episodes.window_is_full
    step(episodes, [0, 30], [0, 0], [0, 1])  # environment 0 only resets
    assert episodes.finished[1:] == [Episode(step=5, return_=60, length=3)]
    assert episodes.window_is_full
    assert (episodes.mean_return, episodes.mean_length) == (31.5, 2.5)


def test_a_step_that_only_resets_counts_for_nothing() -> None:
    episodes = Episodes(num_envs=1)
    step(episodes, [1], [0], [1])
    step(episodes, [99], [1], [1])  # whatever it claims
    step(episodes, [5], [1], [0])
    assert episodes.finished == [Episode(step=1, return_=1, length=1), Episode(step=2, return_=5, length=1)]


def test_trailing_mean_takes_as_many_as_there_are() -> None:
    assert trailing_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1, 2, 4, 6]
