"""Sequences of replay: the native core reads what torch ops read, leaf for leaf, bit for bit and in the same order."""

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


def lived(num_envs: int | None, seed: int, autoreset: Any, device: Memory | str = "cpu") -> rl.ReplayBuffer:
    """A small ring that has gone round: plain and stacked observations, a carried field, cuts and ends."""
    obs = {"plain": rl.Field(WIDE, torch.float64), "frames": rl.Stacked(rl.Field(2, torch.uint8), K, 0)}
    extra = {"hidden": rl.Carry((2,)), "word": rl.Field((), torch.int16)}
    capacity, lead = 12 * (num_envs or 1), () if num_envs is None else (num_envs,)
    replay = rl.ReplayBuffer(
        capacity, obs, (), num_envs=num_envs, extra=extra, autoreset=autoreset, seed=seed,
        device=device,
    )  # fmt: skip
    rng = np.random.default_rng(seed)

    def fresh() -> dict[str, np.ndarray]:
        frame = rng.integers(0, 255, (*lead, 1, 2), np.uint8)
        return {"plain": rng.normal(size=(*lead, WIDE)), "frames": np.repeat(frame, K, len(lead))}

    def led_to(obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        frame = rng.integers(0, 255, (*lead, 1, 2), np.uint8)
        kept = obs["frames"].take(range(1, K), len(lead))
        return {"plain": rng.normal(size=(*lead, WIDE)), "frames": np.concatenate([kept, frame], len(lead))}

    def chosen(mask: np.ndarray, a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.where(mask.reshape(*lead, *(1,) * (a[name].ndim - len(lead))), a[name], b[name]) for name in a}

    obs_now, resets = fresh(), np.zeros(lead, bool)
    for _ in range(int(rng.integers(1, 40))):
        following = led_to(obs_now)
        ends = (rng.random(lead) < 0.2) & ~resets
        first = fresh()
        given = chosen(resets, first, following) if autoreset == "NEXT_STEP" else following
        replay.add(
            obs_now, rng.normal(size=lead), rng.normal(size=lead).astype(np.float32), ends, np.zeros(lead, bool), given,
            hidden=rng.normal(size=(*lead, 2)), word=rng.integers(-9, 9, lead).astype(np.int16),
        )  # fmt: skip
        obs_now = given if autoreset == "NEXT_STEP" else chosen(ends, first, following)
        resets = ends if autoreset == "NEXT_STEP" else resets
        if rng.random() < 0.1 and not resets.any():
            replay.cut()
            obs_now = fresh()
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
            replay = lived(num_envs, seed, autoreset)
            found[name] = replay.read(replay.ids(), view)
    expected = found.pop("torch")
    for name, batch in found.items():
        assert list(batch.keys(True, True)) == list(expected.keys(True, True)), name
        for path, leaf in expected.items(True, True):
            torch.testing.assert_close(batch[path], leaf, rtol=0, atol=0, msg=f"{name} {path}")


@pytest.mark.skipif(not hasattr(kernels.native(), "ProcessLock"), reason="disk memory needs Linux and a compiler")
def test_sequences_of_disk_memory_are_those_of_memory(tmp_path: Any) -> None:
    view = rl.Sequence(4, 2)
    with lived(3, 5, "SAME_STEP", Memory.disk(tmp_path / "replay")) as kept:
        fresh = lived(3, 5, "SAME_STEP")
        assert (kept.read(kept.ids(), view) == fresh.read(fresh.ids(), view)).all()


def test_a_length_that_no_machine_has_memory_for_is_refused() -> None:
    replay = lived(None, 0, "SAME_STEP")
    for length in (2**33, 2**62):
        with pytest.raises((MemoryError, RuntimeError)):
            replay.sample(2, rl.Sequence(length))
    replay.check()
