"""Save and load: the loaded buffer equals the saved buffer and continues in the same way."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.storage.allocator import supports_persistent_memory
from tests.checkpoint.traffic import KINDS, digest, equal, make_replay, step_replay
from tests.tiers import select


@pytest.mark.parametrize("kind", select("prioritized", "rollout", "distillation", of=KINDS))
def test_a_loaded_buffer_goes_on_as_the_saved_one(kind: str, tmp_path: Path, backend: str) -> None:
    """Save several times, load, and use the saved and the loaded buffer in the same way."""
    subject = KINDS[kind]
    buffer = subject.make()
    for n in range(90):
        subject.act(buffer, n)
        if n % 9 != 8:
            continue
        buffer.save(tmp_path)
        twin: Any = rl.load(tmp_path)
        if hasattr(buffer, "_tests_clock"):
            twin._tests_clock = buffer._tests_clock.copy()
        assert equal(digest(buffer), digest(twin))
        for m in range(n + 1, n + 12):
            subject.act(twin, m)
        later = [subject.read(twin) for _ in range(3)]
        other: Any = rl.load(tmp_path)
        if hasattr(buffer, "_tests_clock"):
            other._tests_clock = buffer._tests_clock.copy()
        for m in range(n + 1, n + 12):
            subject.act(other, m)
        assert equal(later, [subject.read(other) for _ in range(3)])
    assert len(list((tmp_path / "manifests").iterdir())) == 2


def test_only_new_rows_are_written(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(40_000, obs=16, action=4, num_envs=4, seed=0)
    zeros = np.zeros((1000, 4))
    block = {
        "obs": np.zeros((1000, 4, 16), np.float32), "action": np.zeros((1000, 4, 4), np.float32), "reward": zeros,
        "terminated": zeros > 0, "truncated": zeros > 0, "next_obs": np.zeros((1000, 4, 16), np.float32),
    }  # fmt: skip
    row = 16 * 4 + 4 * 4 + 4 + 2
    written = 0
    for k in range(14):
        replay.extend(block)
        number = replay.save(tmp_path, keep=1)
        segments, state = (list((tmp_path / folder).glob(f"{number:08}*")) for folder in ("segments", "state"))
        written = sum(path.stat().st_size for path in (*segments, *state))
        assert written <= 1.1 * 4000 * row + 24 * 40_000 + (1 << 20), k
    total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert total <= 40_000 * row + written + 24 * 40_000 + (1 << 20)


def test_another_buffers_save_is_written_in_full(tmp_path: Path) -> None:
    first, second = make_replay(rl.Uniform()), make_replay(rl.Uniform())
    for n in range(20):
        step_replay(first, n)
    first.save(tmp_path)
    for n in range(30):
        step_replay(second, n + 100)
    with pytest.warns(UserWarning, match="checkpoints of another buffer are there, and stay"):
        second.save(tmp_path)
    assert equal(digest(rl.load(tmp_path)), digest(second))
    first.save(tmp_path)
    assert equal(digest(rl.load(tmp_path)), digest(first))
    assert equal(digest(rl.load(tmp_path, number=2)), digest(second))


def test_a_save_before_the_fields_are_known_is_gone_on_from(tmp_path: Path) -> None:
    buffer = rl.DistillationBuffer(4, obs=2, seed=0)
    buffer.save(tmp_path)
    buffer.add([[1.0, 2.0]], [[3.0]])
    buffer.save(tmp_path)
    assert equal(digest(rl.load(tmp_path)), digest(buffer))


def test_a_staged_axis_of_any_stride_is_saved(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(4, obs=2, action=(), num_envs=1, seed=0)
    replay.stage(action=torch.tensor(3.0).expand(1))
    replay.save(tmp_path)
    assert equal(digest(rl.load(tmp_path)), digest(replay))


@pytest.mark.thorough
def test_a_long_list_of_segments_is_made_shorter_by_one_segment_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every save writes only new rows, and at most the rows of one long segment again."""
    monkeypatch.setattr("relive.checkpoint.archive.MAX_JSON_BYTES", 12_000)
    monkeypatch.setattr("relive.checkpoint.saving.SEGMENT_BYTES", 2_000)
    replay = rl.ReplayBuffer(2_000, obs=2, action=(), seed=0)
    row, longest = 2 * 4 + 4 + 4 + 2, 0
    for n in range(300):
        for t in range(2):
            replay.add([2 * n + t, 0.0], 0.0, 0.0, False, False, [2 * n + t + 1, 0.0])
        number = replay.save(tmp_path)
        written = sum(path.stat().st_size for path in (tmp_path / "segments").glob(f"{number:08}*"))
        assert written <= 1.1 * 2 * row + 2_000 + 64
        longest = max(longest, len(list((tmp_path / "segments").iterdir())))
        if n % 50 == 49:
            assert equal(digest(rl.load(tmp_path)), digest(replay))
    assert 10 < longest < 150


def test_saving_takes_little_memory(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(400_000, obs=64, action=4, seed=0)
    steps = 4000
    block = {
        "obs": np.zeros((steps, 64), np.float32), "action": np.zeros((steps, 4), np.float32), "reward": np.zeros(steps),
        "terminated": np.zeros(steps, bool), "truncated": np.zeros(steps, bool),
        "next_obs": np.zeros((steps, 64), np.float32),
    }  # fmt: skip
    for _ in range(100):
        replay.extend(block)
    tracemalloc.start()
    replay.save(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_old_checkpoints_are_kept_as_asked(tmp_path: Path) -> None:
    replay, digests = make_replay(rl.Prioritized()), {}
    for n in range(60):
        step_replay(replay, n)
        if n % 6 == 5:
            digests[replay.save(tmp_path, keep=3)] = digest(replay)
    numbers = sorted(digests)[-3:]
    assert [int(path.stem) for path in sorted((tmp_path / "manifests").iterdir())] == numbers
    for number in numbers:
        assert equal(digest(rl.load(tmp_path, number=number)), digests[number])
    with pytest.raises(
        rl.NoCheckpoint,
        match=r"00000001.json: expected one of the checkpoints 8, 9, 10, got 1. Pass one of these numbers",
    ):
        rl.load(tmp_path, number=1)


def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path: Path) -> None:
    replay = make_replay(rl.Uniform())
    for n in range(10):
        step_replay(replay, n)
    replay.save(tmp_path)
    older = digest(replay)
    step_replay(replay, 10)
    replay.save(tmp_path)
    state = tmp_path / "state" / "00000002.bin"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.warns(
        UserWarning, match="skipped a damaged checkpoint and loaded number 1. state/00000002.bin: expected"
    ):
        loaded = rl.load(tmp_path)
    assert equal(digest(loaded), older)
    with pytest.raises(rl.CorruptCheckpoint, match=r"state/00000002.bin: expected \d+ bytes, got"):
        rl.load(tmp_path, number=2)
    # The buffer stays usable: the next save writes all rows again.
    replay.save(tmp_path)
    assert equal(digest(rl.load(tmp_path)), digest(replay))


def test_where_nothing_was_saved_there_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(rl.NoCheckpoint):
            rl.load(path)


def test_a_function_for_beta_is_given_again(tmp_path: Path) -> None:
    sampler = rl.Prioritized(beta=lambda draws: min(1.0, draws / 100))
    replay = make_replay(sampler)
    for n in range(20):
        step_replay(replay, n)
    replay.save(tmp_path)
    with pytest.raises(
        rl.IncompatibleCheckpoint,
        match=r"sampler: beta: expected a setting that files can hold, such as rl\.Linear.*, got a function",
    ):
        rl.load(tmp_path)
    twin = rl.load(tmp_path, rl.ReplayBuffer, sampler=sampler)
    assert equal(replay.sample(8).to_dict(), twin.sample(8).to_dict())


def test_another_sampler_is_refused(tmp_path: Path) -> None:
    make_replay(rl.Uniform()).save(tmp_path)
    with pytest.raises(rl.IncompatibleCheckpoint, match="sampler: expected the state of Prioritized"):
        rl.load(tmp_path, sampler=rl.Prioritized())


def test_stacks_and_their_history_are_saved(tmp_path: Path) -> None:
    frame = rl.Stacked(rl.Field((2, 2), torch.uint8), 3)
    replay = rl.ReplayBuffer(6, obs=frame, action=(), num_envs=1, seed=0)
    frames = [np.full((2, 2), i, np.uint8) for i in range(30)]

    def stack(t: int, start: int) -> Any:
        return np.stack([frames[max(i, start)] for i in (t - 2, t - 1, t)], -1)[None]

    start = 0
    for t in range(20):
        ends = t in (4, 13)
        replay.add(stack(t, start), [0.0], [0.0], [ends], [False], stack(t + 1, start))
        start = t + 1 if ends else start
        replay.save(tmp_path)
        twin = rl.load(tmp_path, rl.ReplayBuffer)
        ids = replay.ids()
        assert equal(replay[ids].to_dict(), twin[ids].to_dict())


@pytest.mark.skipif(not supports_persistent_memory(), reason="needs Linux and the native core")
def test_memory_of_another_kind_is_told_and_draws_go_on(tmp_path: Path) -> None:
    replay = make_replay(rl.Uniform(), stats=None, norm=None)
    for n in range(20):
        step_replay(replay, n)
    replay.save(tmp_path / "own")
    disk = rl.Memory.disk(tmp_path / "disk")
    with pytest.warns(UserWarning, match="load: own memory became shared memory"):
        shared = rl.load(tmp_path / "own", rl.ReplayBuffer, device=rl.Memory.shared())
    with pytest.warns(UserWarning, match="load: own memory became disk memory"):
        rl.load(tmp_path / "own", rl.ReplayBuffer, device=disk).close()
    shared.save(tmp_path / "shared")
    # The unchanged device must not cause a warning, which would be an error here.
    again = rl.load(tmp_path / "shared", rl.ReplayBuffer, device=rl.Memory.shared())
    expected = replay.sample(50)["index"]
    for other in (shared, again):
        assert torch.equal(other.sample(50)["index"], expected)
    with pytest.warns(UserWarning, match="load: shared memory became own memory"):
        rl.load(tmp_path / "shared", device="cpu")


def test_loading_warns_of_nothing_when_nothing_changes(tmp_path: Path) -> None:
    replay = make_replay(rl.Uniform())
    replay.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rl.load(tmp_path, device="cpu")


def test_an_empty_buffer_that_was_loaded_is_saved_again_where_it_was(tmp_path: Path) -> None:
    rl.ReplayBuffer(8, obs=1, action=(), num_envs=2).save(tmp_path)
    again = rl.load(tmp_path, kind=rl.ReplayBuffer)
    flags = np.zeros(2, bool)
    again.add(np.zeros((2, 1)), np.zeros(2), np.zeros(2), flags, flags, np.ones((2, 1)))
    assert again.save(tmp_path) == 2
    assert len(rl.load(tmp_path)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": 5}, "kind: expected a class of buffers, got 5"),
        ({"number": [1]}, "number: expected"),
        ({"number": 0}, "number: expected"),
    ],
)
def test_arguments_of_load_are_checked(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    KINDS["uniform"].make().save(tmp_path)
    with pytest.raises(rl.SchemaError, match=message):
        rl.load(tmp_path, **arguments)
