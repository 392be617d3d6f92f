"""Tests of uniform draws with torch ops: every transition has one number, for any state of the rings."""

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


class ConsecutiveNumbers(Randomness):
    """Random generator that returns the numbers 0, 1, 2, …"""

    def integers(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.arange(count, device=device)


def make_step(envs: int, t: int, ends: bool) -> dict[str, Any]:
    """Make a step from observation t to t + 1, or to the final observation −1 − t."""
    flags = {"terminated": np.full(envs, ends), "truncated": np.zeros(envs, bool)}
    numbers = {"obs": np.full((envs, 1), t), "action": np.zeros(envs), "reward": np.zeros(envs)}
    return {**numbers, **flags, "next_obs": np.full((envs, 1), -1 - t if ends else t + 1)}


def check_every_row_once(replay: rl.ReplayBuffer) -> None:
    """Check that each transition is drawn once by as many consecutive numbers as there are transitions."""
    stored = replay.ids().tolist()
    store: Any = replay.storage
    # Numbers from the count on draw the first transitions again.
    for start in (0, 3 * len(stored)):
        drawn = store.draw(len(stored) + start, ConsecutiveNumbers())[start:]
        assert sorted(store.rows.ring.ids_at(drawn).tolist()) == stored


def make_many_final_rows() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(4 * 33, 1, (), num_envs=4, seed=0)
    for t in range(100):
        replay.add(**make_step(4, t, ends=True))
    return replay


def make_unequal_fills() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(5 * 64, 1, (), num_envs=5, seed=0)
    for env, steps in enumerate((1, 200, 0, 17, 64)):
        for t in range(steps):
            replay.add(**make_step(1, t, ends=t % (env + 2) == 0), env_ids=[env])
    return replay


def make_one_of_thousands() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(3000 * 8, 1, (), num_envs=3000, seed=0)
    for t in range(6):
        replay.add(**make_step(1, t, ends=False), env_ids=[1234])
    return replay


RINGS = {
    "many final rows": make_many_final_rows,
    "unequal fills": make_unequal_fills,
    "one of thousands": make_one_of_thousands,
}


@pytest.mark.parametrize("name", RINGS)
def test_every_transition_has_one_number(name: str) -> None:
    replay = RINGS[name]()
    check_every_row_once(replay)
    replay.check()


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("next_obs", ["shared", "stored"])
def test_writes_update_the_index(next_step: bool, next_obs: str) -> None:
    random = np.random.default_rng(0)
    both = Both(6, 3, random, next_step=next_step, next_obs=next_obs)
    both.add()
    both.replay.sample(1)
    for _ in range(40):
        both.play(1)
        if len(both.replay):
            check_every_row_once(both.replay)


def test_rows_that_were_loaded_are_drawn(tmp_path: Any) -> None:
    replay = make_unequal_fills()
    replay.sample(1)
    replay.save(tmp_path)
    loaded: Any = rl.load(tmp_path)
    check_every_row_once(loaded)
    for t in range(30):
        loaded.add(**make_step(5, 1000 + t, ends=t % 4 == 0))
        check_every_row_once(loaded)


def test_a_device_that_has_no_rows_draws_inside_the_memory() -> None:
    """On a device, a slot outside the memory would kill the process."""
    replay = rl.ReplayBuffer(8, 1, (), num_envs=2, seed=0)
    assert int(replay.storage.draw(4, Randomness(0)).max()) < 10


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized()], ids=str)
def test_a_first_draw_in_inference_mode_hinders_no_later_write(sampler: Any) -> None:
    replay = rl.ReplayBuffer(32, 1, (), num_envs=2, sampler=sampler, seed=0)
    replay.add(**make_step(2, 0, ends=False))
    with torch.inference_mode():
        batch = replay.sample(4)
        if isinstance(sampler, rl.Prioritized):
            replay.update_priority(batch["index"], torch.ones(4))
    replay.add(**make_step(2, 1, ends=False))
    replay.sample(4)
    replay.check()
