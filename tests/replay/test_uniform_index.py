"""Uniform draws with torch ops: every transition has exactly one number, in rings of any state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive import kernels
from relive.rng import Randomness
from tests.layouts import Both


@pytest.fixture(autouse=True)
def _torch_ops() -> Iterator[None]:
    with kernels.force("torch"):
        yield


class Counting(Randomness):
    """Returns the numbers 0, 1, 2, … instead of random numbers."""

    def integers(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.arange(count, device=device)


def step(envs: int, t: int, ends: bool) -> dict[str, Any]:
    """Return a step from observation t to t + 1, or, if the episode ends, to -1 - t."""
    flags = {"terminated": np.full(envs, ends), "truncated": np.zeros(envs, bool)}
    numbers = {"obs": np.full((envs, 1), t), "action": np.zeros(envs), "reward": np.zeros(envs)}
    return {**numbers, **flags, "next_obs": np.full((envs, 1), -1 - t if ends else t + 1)}


def every_row_once(replay: rl.ReplayBuffer) -> None:
    """Assert that as many consecutive numbers as there are transitions draw every transition once."""
    stored = replay.ids().tolist()
    store: Any = replay.storage
    # Numbers beyond the number of transitions begin again at the first.
    for start in (0, 3 * len(stored)):
        drawn = store.draw(len(stored) + start, Counting())[start:]
        assert sorted(store.rows.ring.ids_at(drawn).tolist()) == stored


def many_final_rows() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(4 * 33, 1, (), num_envs=4, seed=0)
    for t in range(100):
        replay.add(**step(4, t, ends=True))
    return replay


def unequal_fills() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(5 * 64, 1, (), num_envs=5, seed=0)
    for env, steps in enumerate((1, 200, 0, 17, 64)):
        for t in range(steps):
            replay.add(**step(1, t, ends=t % (env + 2) == 0), env_ids=[env])
    return replay


def one_of_thousands() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(3000 * 8, 1, (), num_envs=3000, seed=0)
    for t in range(6):
        replay.add(**step(1, t, ends=False), env_ids=[1234])
    return replay


RINGS = {"many final rows": many_final_rows, "unequal fills": unequal_fills, "one of thousands": one_of_thousands}


@pytest.mark.parametrize("name", RINGS)
def test_every_transition_has_one_number(name: str) -> None:
    replay = RINGS[name]()
    every_row_once(replay)
    replay.check()


@pytest.mark.parametrize("name", RINGS)
def test_draws_are_uniform(name: str) -> None:
    replay = RINGS[name]()
    ids = replay.ids()
    draws = 400 * len(ids)
    counts = torch.bincount(torch.searchsorted(ids, replay.sample(draws)["index"]), minlength=len(ids)).double()
    excess = float(((counts - 400) ** 2 / 400).sum()) - (len(ids) - 1)
    # The limit is five standard deviations of χ².
    assert abs(excess) < 5 * (2 * len(ids)) ** 0.5


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("next_obs", ["shared", "stored"])
def test_writes_keep_the_queues_up(next_step: bool, next_obs: str) -> None:
    random = np.random.default_rng(0)
    both = Both(6, 3, random, next_step=next_step, next_obs=next_obs)
    both.add()
    both.replay.sample(1)
    for _ in range(40):
        both.play(1)
        if len(both.replay):
            every_row_once(both.replay)


def test_rows_that_were_loaded_are_drawn(tmp_path: Any) -> None:
    replay = unequal_fills()
    replay.sample(1)
    replay.save(tmp_path)
    again: Any = rl.load(tmp_path)
    every_row_once(again)
    for t in range(30):
        again.add(**step(5, 1000 + t, ends=t % 4 == 0))
        every_row_once(again)


def test_a_device_that_has_no_rows_draws_inside_the_memory() -> None:
    """If all rows were resets, only the device has the count 0; a slot outside the memory would end the process."""
    replay = rl.ReplayBuffer(8, 1, (), num_envs=2, seed=0)
    assert int(replay.storage.draw(4, Randomness(0)).max()) < 10


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized()], ids=str)
def test_a_first_draw_in_inference_mode_hinders_no_later_write(sampler: Any) -> None:
    replay = rl.ReplayBuffer(32, 1, (), num_envs=2, sampler=sampler, seed=0)
    replay.add(**step(2, 0, ends=False))
    with torch.inference_mode():
        batch = replay.sample(4)
        if isinstance(sampler, rl.Prioritized):
            replay.update_priority(batch["index"], torch.ones(4))
    replay.add(**step(2, 1, ends=False))
    replay.sample(4)
    replay.check()
