"""Tests of `Sequence`: the native core and torch ops read the same leaves in the same order, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from relive import kernels
from relive.storage import Memory
from tests.conftest import BACKENDS

WIDE, K = 3, 3


def make_buffer(num_envs: int | None, seed: int, autoreset: Any, device: Memory | str = "cpu") -> rl.ReplayBuffer:
    """Make a small ring that has wrapped around: plain and stacked observations, a `Carry` field, cuts and ends."""
    obs = {"plain": rl.Field(WIDE, torch.float64), "frames": rl.Stacked(rl.Field(2, torch.uint8), K, 0)}
    extra = {"hidden": rl.Carry((2,)), "word": rl.Field((), torch.int16)}
    capacity, lead = 12 * (num_envs or 1), () if num_envs is None else (num_envs,)
    replay = rl.ReplayBuffer(
        capacity, obs, (), num_envs=num_envs, extra=extra, autoreset=autoreset, seed=seed,
        device=device,
    )  # fmt: skip
    rng = np.random.default_rng(seed)

    def make_first_obs() -> dict[str, np.ndarray]:
        frame = rng.integers(0, 255, (*lead, 1, 2), np.uint8)
        return {"plain": rng.normal(size=(*lead, WIDE)), "frames": np.repeat(frame, K, len(lead))}

    def make_next_obs(obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        frame = rng.integers(0, 255, (*lead, 1, 2), np.uint8)
        old_frames = obs["frames"].take(range(1, K), len(lead))
        return {"plain": rng.normal(size=(*lead, WIDE)), "frames": np.concatenate([old_frames, frame], len(lead))}

    def where(mask: np.ndarray, a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.where(mask.reshape(*lead, *(1,) * (a[name].ndim - len(lead))), a[name], b[name]) for name in a}

    obs_now, resets = make_first_obs(), np.zeros(lead, bool)
    for _ in range(int(rng.integers(1, 40))):
        next_obs = make_next_obs(obs_now)
        ends = (rng.random(lead) < 0.2) & ~resets
        first = make_first_obs()
        given = where(resets, first, next_obs) if autoreset == "NEXT_STEP" else next_obs
        replay.add(
            obs_now, rng.normal(size=lead), rng.normal(size=lead).astype(np.float32), ends, np.zeros(lead, bool), given,
            hidden=rng.normal(size=(*lead, 2)), word=rng.integers(-9, 9, lead).astype(np.int16),
        )  # fmt: skip
        obs_now = given if autoreset == "NEXT_STEP" else where(ends, first, next_obs)
        resets = ends if autoreset == "NEXT_STEP" else resets
        if rng.random() < 0.1 and not resets.any():
            replay.cut()
            obs_now = make_first_obs()
    return replay


@settings(max_examples=80, deadline=None)
@given(
    num_envs=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 2**31),
    autoreset=st.sampled_from(["SAME_STEP", "NEXT_STEP"]),
    length=st.integers(1, 30),
    burn_in=st.integers(0, 20),
    cross=st.booleans(),
)
def test_every_backend_reads_the_same(
    num_envs: int | None, seed: int, autoreset: str, length: int, burn_in: int, cross: bool
) -> None:
    view = rl.Sequence(length, burn_in, cross)
    found = {}
    for name, backend in BACKENDS.items():
        with backend():
            replay = make_buffer(num_envs, seed, autoreset)
            found[name] = replay.read(replay.ids(), view)
    expected = found.pop("torch")
    for name, batch in found.items():
        assert list(batch.keys(True, True)) == list(expected.keys(True, True)), name
        for path, leaf in expected.items(True, True):
            torch.testing.assert_close(batch[path], leaf, rtol=0, atol=0, msg=f"{name} {path}")


@pytest.mark.skipif(not hasattr(kernels.native(), "ProcessLock"), reason="disk memory needs Linux and a compiler")
def test_sequences_of_disk_memory_are_those_of_memory(tmp_path: Any) -> None:
    view = rl.Sequence(4, 2)
    with make_buffer(3, 5, "SAME_STEP", Memory.disk(tmp_path / "replay")) as old_frames:
        make_first_obs = make_buffer(3, 5, "SAME_STEP")
        assert (old_frames.read(old_frames.ids(), view) == make_first_obs.read(make_first_obs.ids(), view)).all()


def test_a_length_that_no_machine_has_memory_for_is_refused() -> None:
    replay = make_buffer(None, 0, "SAME_STEP")
    for length in (2**33, 2**62):
        with pytest.raises((MemoryError, RuntimeError)):
            replay.sample(2, rl.Sequence(length))
    replay.check()
