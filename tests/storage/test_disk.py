"""Replay buffers in disk memory: they equal buffers in RAM, and can be reopened after close()."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.cli import main
from relive.inspector.saved import peek
from tests.checkpoint.traffic import KINDS, N, digest, draw, equal, make_replay, step_replay
from tests.tiers import select

REPLAYS = ["uniform", "prioritized", "epochs", "next step", "stored"]
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {"sampler": rl.Uniform()},
    "prioritized": {"sampler": rl.Prioritized(normalize="global")},
    "epochs": {"sampler": rl.WithoutReplacement()},
    "next step": {"sampler": rl.Prioritized(), "autoreset": "NEXT_STEP"},
    "stored": {"sampler": rl.Prioritized(), "next_obs": "stored"},
}


def on_disk(kind: str, root: Path) -> rl.ReplayBuffer:
    return make_replay(**OPTIONS[kind], device=rl.Memory.disk(root))


@pytest.mark.parametrize("kind", REPLAYS)
def test_a_buffer_on_disk_is_what_it_is_in_memory(kind: str, tmp_path: Path) -> None:
    buffers = [KINDS[kind].make(), on_disk(kind, tmp_path / "memory")]
    for n in range(140):
        for buffer in buffers:
            step_replay(buffer, n)
        if n % 10 == 0:
            first, second = (KINDS[kind].read(buffer) for buffer in buffers)
            assert equal(first, second)
    assert equal(*map(digest, buffers))
    buffers[1].check()


@pytest.mark.parametrize("kind", REPLAYS)
@pytest.mark.parametrize("steps", select(23, of=[0, 1, 23, 90]))
def test_a_closed_buffer_goes_on_where_it_was(kind: str, steps: int, tmp_path: Path) -> None:
    twin, on_disk_replay = KINDS[kind].make(), on_disk(kind, tmp_path / "memory")
    for n in range(steps):
        step_replay(twin, n)
        step_replay(on_disk_replay, n)
    clock = getattr(on_disk_replay, "_tests_clock", None)
    on_disk_replay.stage(action=np.ones((N, 1), np.float32))
    twin.stage(action=np.ones((N, 1), np.float32))
    before = digest(on_disk_replay)
    on_disk_replay.close()
    again = rl.load(tmp_path / "memory", rl.ReplayBuffer)
    assert equal(digest(again), before)
    again.check()
    for buffer in (twin, again):
        buffer._input.staged.clear()
    if clock is not None:
        again._tests_clock = clock  # type: ignore[attr-defined]
    for n in range(steps, steps + 40):
        step_replay(twin, n)
        step_replay(again, n)
        assert equal(KINDS[kind].read(twin), KINDS[kind].read(again))
    assert equal(digest(twin), digest(again))


def test_a_seed_begins_anew_and_none_goes_on(tmp_path: Path) -> None:
    def opened(seed: int | None) -> rl.ReplayBuffer:
        return rl.ReplayBuffer(64, 1, 1, device=rl.Memory.disk(tmp_path / "memory"), seed=seed)

    with opened(3) as replay:
        for step in range(50):
            replay.add([step], [step], step, False, False, [step + 1])
        first = replay.sample(8)["index"]
        replay.commit()
        next_draws = replay.sample(8)["index"]
        replay._random.bits.state = np.random.PCG64DXSM(9).state
    with opened(3) as replay:
        assert torch.equal(replay.sample(8)["index"], first)
        replay.commit()
    with opened(None) as replay:
        assert torch.equal(replay.sample(8)["index"], next_draws)


def test_what_was_closed_cannot_be_used(tmp_path: Path) -> None:
    for device in ("cpu", rl.Memory.disk(tmp_path / "memory")):
        replay = rl.ReplayBuffer(8, 1, 1, device=device)
        replay.add([0], [0], 0, False, False, [1])
        replay.close()
        replay.close()
        calls: list[Any] = [
            lambda replay=replay: replay.add([1], [0], 0, False, False, [2]),
            lambda replay=replay: replay.sample(1),
            lambda replay=replay: replay.clear(),
            lambda replay=replay: replay.commit(),
            lambda replay=replay: replay.check(),
            lambda replay=replay: len(replay),
            lambda replay=replay: replay.save(tmp_path / "saved"),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="expected use before close\\(\\), got use after it"):
                call()


def test_who_waits_for_a_buffer_that_is_closed_does_not_write_to_it(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(8, 1, 1, device=rl.Memory.disk(tmp_path / "memory"))
    errors: list[BaseException] = []

    def add() -> None:
        try:
            replay.add([1], [0], 0, False, False, [2])
        except RuntimeError as error:
            errors.append(error)

    lock = replay._lock
    with lock:
        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        replay.close()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 4
    assert len(rl.load(tmp_path / "memory")) == 0


def test_a_disk_buffer_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    replay = on_disk("prioritized", tmp_path / "memory")
    for n in range(90):
        step_replay(replay, n)
    replay.save(tmp_path / "saved")
    in_memory = rl.load(tmp_path / "saved")
    assert equal(digest(in_memory), digest(replay))
    copied = rl.load(tmp_path / "saved", rl.ReplayBuffer, device=rl.Memory.disk(tmp_path / "copy"))
    copied.check()
    assert equal(digest(copied), digest(replay))
    copied.close()
    assert equal(digest(rl.load(tmp_path / "copy")), digest(replay))
    with pytest.raises(
        rl.IncompatibleCheckpoint, match="expected an empty folder for disk memory, got a folder that holds a buffer"
    ):
        rl.load(tmp_path / "saved", device=rl.Memory.disk(tmp_path / "copy"))


def test_a_folder_of_the_other_kind_is_refused_by_name(tmp_path: Path) -> None:
    replay = on_disk("uniform", tmp_path / "memory")
    source = KINDS["uniform"].make()
    source.save(tmp_path / "saved")
    with pytest.raises(rl.IncompatibleCheckpoint, match=r"expected the kind 'disk memory', got 'checkpoint'\. Load"):
        on_disk("uniform", tmp_path / "saved")
    with pytest.raises(rl.IncompatibleCheckpoint, match=r"expected the kind 'checkpoint', got 'disk memory'\. Pass"):
        source.save(tmp_path / "memory")
    replay.check()


def test_a_load_into_disk_memory_that_fails_leaves_nothing(tmp_path: Path) -> None:
    buffer = KINDS["uniform"].make()
    for n in range(40):
        step_replay(buffer, n)
    buffer.save(tmp_path / "saved")
    segment = next((tmp_path / "saved" / "segments").iterdir())
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    with pytest.raises(rl.CorruptCheckpoint):
        rl.load(tmp_path / "saved", device=rl.Memory.disk(tmp_path / "memory"))
    assert {path.name for path in (tmp_path / "memory").iterdir()} <= {"LOCK"}


def test_load_state_dict_into_disk_memory(tmp_path: Path) -> None:
    source = KINDS["prioritized"].make()
    for n in range(60):
        step_replay(source, n)
    on_disk_replay = on_disk("prioritized", tmp_path / "memory")
    on_disk_replay.load_state_dict(source.state_dict())
    on_disk_replay.check()
    on_disk_replay.close()
    assert equal(digest(rl.load(tmp_path / "memory")), digest(source))


def test_a_state_that_does_not_fit_leaves_disk_memory_as_it_was(tmp_path: Path) -> None:
    on_disk_replay = on_disk("prioritized", tmp_path / "memory")
    for n in range(60):
        step_replay(on_disk_replay, n)
    before = digest(on_disk_replay)
    state = rl.ReplayBuffer(8, 1, 1, sampler=rl.Prioritized()).state_dict()
    with pytest.raises(rl.SchemaError):
        on_disk_replay.load_state_dict(state)
    assert equal(digest(on_disk_replay), before)
    on_disk_replay.close()
    assert equal(digest(rl.load(tmp_path / "memory")), before)


def test_nothing_of_disk_memory_is_changed_by_loading(tmp_path: Path) -> None:
    on_disk("uniform", tmp_path / "memory").close()
    changes: list[dict[str, Any]] = [{"device": "cpu"}, {"number": 1}]
    for options in changes:
        with pytest.raises(rl.IncompatibleCheckpoint, match="expected no changes to disk memory, got "):
            rl.load(tmp_path / "memory", **options)


def test_looking_at_disk_memory_leaves_the_files_as_they_are(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    replay = on_disk("prioritized", root)
    for n in range(60):
        step_replay(replay, n)
    expected = draw(replay)
    # Without close(), the folder is left as after a kill.
    del replay
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    looked = peek(root)
    assert len(draw(looked)) == len(expected)
    step_replay(looked, 61)
    looked.commit()
    looked.close()
    assert main(["check", str(root)]) == 0
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before


def test_a_folder_in_use_is_not_read_before_it_is_locked(tmp_path: Path) -> None:
    """The process that uses the folder may be in the middle of a commit."""
    replay = on_disk("uniform", tmp_path)
    for name in ("commit0", "commit1"):
        (tmp_path / name).write_bytes(b"half a commit")
    with pytest.raises(rl.CheckpointError, match="expected one process at a time, got a folder that another process"):
        rl.load(tmp_path)
    replay.close()
    assert len(rl.load(tmp_path)) == 0


def test_check_names_a_row_that_the_disk_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = rl.ReplayBuffer(20, 3, 1, device=rl.Memory.disk(tmp_path))
    for step in range(10):
        replay.add(np.full(3, step), [0], 0, False, False, np.full(3, step + 1))
    replay.close()
    obs = np.memmap(tmp_path / "column0", np.float32, "r+")
    obs[3 * 4 + 1] += 0.5
    del obs
    assert main(["check", str(tmp_path)]) == 1
    assert "row 4, environment 0 (slot 4): expected the bytes that were written" in capsys.readouterr().out


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_commit_every_is_a_number_of_steps(every: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="commit_every"):
        rl.Memory.disk(tmp_path, commit_every=every)


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_path_is_asked_for(path: Any) -> None:
    with pytest.raises(rl.SchemaError, match="Memory.disk: expected the path of a folder"):
        rl.Memory.disk(path)


def test_commits_come_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay: Any = rl.ReplayBuffer(1000, 1, 1, device=rl.Memory.disk(tmp_path, commit_every=50))
    first = replay._allocator._number
    for step in range(500):
        replay.add([step], [0], 0, False, False, [step + 1])
    assert 9 <= replay._allocator._number - first <= 12
    before = replay._allocator._number
    monkeypatch.setattr("relive.storage.disk.time.monotonic", lambda: replay._allocator._deadline + 1)
    replay.add([500], [0], 0, False, False, [501])
    assert replay._allocator._number == before + 1


def test_where_there_is_no_native_core_a_whole_disk_memory_is_not_called_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rl.ReplayBuffer(8, 1, (), device=rl.Memory.disk(tmp_path)).close()
    with rl.kernels.force_torch():
        with pytest.raises(rl.IncompatibleCheckpoint, match="Linux and relive's native core, got no native core"):
            rl.load(tmp_path)
        assert main(["inspect", str(tmp_path)]) == 1
        assert main(["check", str(tmp_path)]) == 1
    assert "is invalid" not in capsys.readouterr().out
    assert main(["check", str(tmp_path)]) == 0


def test_only_replay_buffers_are_kept_on_a_disk(tmp_path: Path) -> None:
    with pytest.raises(rl.SchemaError, match="Only a ReplayBuffer"):
        rl.RolloutBuffer(4, 1, 1, 1, device=rl.Memory.disk(tmp_path / "memory"))
    assert not (tmp_path / "memory").exists()
