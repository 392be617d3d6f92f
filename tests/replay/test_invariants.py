"""The native check of a ring finds the same violations as the checks in Python, which explain them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relive as rl
from relive import kernels
from relive.errors import InvariantError
from relive.replay.invariants import check_rows

pytestmark = pytest.mark.skipif(kernels.native_core() is None, reason="needs the native core")

BUFFERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stored": {"next_obs": "stored"},
    "next step": {"autoreset": "NEXT_STEP"},
    "stored, next step": {"next_obs": "stored", "autoreset": "NEXT_STEP"},
    "stacked": {"obs": rl.Stacked(2, k=3)},
    "mutable": {"extra": {"note": rl.Mutable(1)}},
}


def make(options: dict[str, Any], rng: np.random.Generator) -> rl.ReplayBuffer:
    """Return a buffer with a random history of steps, ends, cuts and a clear."""
    settings: dict[str, Any] = {"obs": 2, **options}
    replay = rl.ReplayBuffer(12, action=(), num_envs=2, **settings)
    steps = int(rng.integers(0, 20))
    is_stacked = isinstance(settings["obs"], rl.Stacked)
    shape = (2, 2, 3) if is_stacked else (2, 2)
    extra = {"note": np.zeros((2, 1), np.float32)} if "extra" in options else {}
    for step in range(steps):
        done = np.zeros(2, bool) if is_stacked else rng.random(2) < 0.25
        obs = np.zeros(shape, np.float32)
        replay.add(obs, np.zeros(2), np.zeros(2), done, np.zeros(2, bool), obs.copy(), **extra)
        if rng.random() < 0.1:
            replay.cut()
        if step == 5 and rng.random() < 0.2:
            replay.clear()
    return replay


def arrays(replay: rl.ReplayBuffer) -> dict[str, np.ndarray]:
    terminated, truncated = replay.storage.rows.end_flags()
    tensors = {**replay.storage.ring.state, "terminated": terminated, "truncated": truncated}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("options", BUFFERS.values(), ids=BUFFERS)
def test_the_native_check_agrees_with_the_checks_that_explain(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    valid = 0
    for _ in range(40):
        replay = make(options, rng)
        replay.check()
        core: Any = replay.storage._is_valid
        assert core()
        state = arrays(replay)
        for _ in range(40):
            array = state[list(state)[int(rng.integers(len(state)))]].reshape(-1)
            bytes_ = array.view(np.uint8) if array.dtype == bool else array
            place, delta = int(rng.integers(len(array))), int(rng.choice([-2, -1, 1, 2, 3]))
            old = bytes_[place]
            bytes_[place] = (int(old) + delta) % 256 if array.dtype != np.int64 else old + delta
            try:
                check_rows(replay.storage.rows)
                explained = None
            except InvariantError as error:
                explained = str(error)
            assert core() == (explained is None), explained
            valid += explained is None
            bytes_[place] = old
        assert core()
    assert 0 < valid < 1600 - 400
