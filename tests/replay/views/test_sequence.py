"""Tests of `Sequence`: the native core and torch ops read the same leaves in the same order, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from relive import kernels
from relive.storage import Memory
from tests.conftest import BACKENDS
from tests.replay.views.lives import RecordedReplay, record_replay


@settings(max_examples=150, deadline=None)
@given(
    num_envs=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 7),
    autoreset=st.sampled_from(["SAME_STEP", "NEXT_STEP"]),
    length=st.integers(1, 30),
    burn_in=st.integers(0, 20),
    cross=st.booleans(),
    step_index=st.booleans(),
)
def test_every_backend_reads_the_same(
    num_envs: int | None, seed: int, autoreset: str, length: int, burn_in: int, cross: bool, step_index: bool
) -> None:
    view = rl.Sequence(length, burn_in, cross, step_index)
    found = {}
    for name, backend in BACKENDS.items():
        replay = record_replay(name, num_envs, seed, autoreset).replay
        with backend():
            found[name] = replay.read(replay.ids(), view)
    expected = found.pop("torch")
    for name, batch in found.items():
        assert list(batch.keys(True, True)) == list(expected.keys(True, True)), name
        for path, leaf in expected.items(True, True):
            assert batch[path].numpy().tobytes() == leaf.numpy().tobytes(), (name, path)
            assert batch[path].dtype == leaf.dtype


@pytest.mark.skipif(not hasattr(kernels.native_core(), "ProcessLock"), reason="disk memory needs Linux and a compiler")
def test_sequences_of_disk_memory_are_those_of_memory(tmp_path: Any) -> None:
    view = rl.Sequence(4, 2)
    plain, disk = (RecordedReplay(3, 5, "SAME_STEP", place).replay for place in ("cpu", Memory.disk(tmp_path / "disk")))
    with disk:
        assert (disk.read(disk.ids(), view) == plain.read(plain.ids(), view)).all()


def test_a_length_that_no_machine_has_memory_for_is_refused() -> None:
    replay = RecordedReplay(None, 0, "SAME_STEP").replay
    for length in (2**33, 2**62):
        with pytest.raises((MemoryError, RuntimeError)):
            replay.sample(2, rl.Sequence(length))
    replay.check()
