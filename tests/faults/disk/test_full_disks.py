"""B3: a small disk fills up after disk memory was opened; `add` and `commit` keep working."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.storage.files import FileOperations
from tests.checkpoint.traffic import digest, equal
from tests.faults.disk.full import small_disk
from tests.totals import tell

N = 3
SIZE = 2 << 20


def make_buffer(root: Path, sampler: Any = None, **options: Any) -> rl.ReplayBuffer:
    """Return a buffer that uses everything that commits contain."""
    return rl.ReplayBuffer(
        60, {"x": 2, "image": rl.Field((16, 16), torch.uint8)}, 1, num_envs=N, sampler=sampler, seed=0,
        extra={"tag": rl.Field((), torch.int32)}, stats=rl.EpisodeStats(N, window=5, metrics=("tag",)),
        norm={("obs", "x"): rl.RunningNorm(2)}, device=rl.Memory.disk(root, commit_every=4), **options,
    )  # fmt: skip


def obs_at(t: int) -> dict[str, np.ndarray]:
    return {"x": np.full((N, 2), t, np.float32), "image": np.full((N, 16, 16), t % 256, np.uint8)}


def step(replay: rl.ReplayBuffer, t: int) -> None:
    """Stage and add a step; sample, to begin an epoch."""
    if not replay.state_dict()["values"]["staged"]["names"]:
        replay.stage(obs=obs_at(t))
    ends = np.array([t % 7 == 6, False, False])
    replay.add(
        action=np.full((N, 1), t, np.float32), reward=np.ones(N), terminated=ends, truncated=~ends & False,
        next_obs=obs_at(t + 1), tag=np.full(N, t, np.int32),
    )  # fmt: skip
    batch = replay.sample(2)
    if isinstance(replay.sampler, rl.Prioritized):
        replay.update_priority(batch["index"], batch["tag"].abs())
    if t % 3:
        replay.stage(obs=obs_at(t + 1))


def comparable_state(replay: rl.ReplayBuffer) -> Any:
    """Return the state of a buffer without epoch ids of dropped rows, which reopening removes."""
    config, values, arrays, rows = digest(replay)
    return config, values, {name: x for name, x in arrays.items() if name != "sampler.ids"}, rows


SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": rl.Uniform,
    "prioritized": rl.Prioritized,
    "epochs": rl.WithoutReplacement,
    "counted": lambda: rl.Counted(rl.Prioritized()),
}


def live_through_full_disk(sampler: str, tmp_path: Path) -> tuple[int, bool]:
    """Add and commit on a full disk; return the number of commits."""
    commits = 0
    with small_disk(tmp_path / "disk", SIZE) as disk:
        replay = make_buffer(disk.root / "replay", SAMPLERS[sampler]())
        for t in range(48):
            disk.fill()
            # `add` commits from time to time.
            step(replay, t)
            if t % 4 == 3:
                disk.fill()
                replay.commit()
                rows, copy = digest(replay)[3], tmp_path / "copy"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(disk.root / "replay", copy)
                with rl.load(copy, rl.ReplayBuffer) as found:
                    found.check()
                    assert equal(digest(found)[3], rows), t
                commits += 1
        disk.fill()
        replay.load_state_dict(replay.state_dict())
        whole = comparable_state(replay)
        disk.fill()
        replay.close()
        disk.fill()
        with rl.load(disk.root / "replay", rl.ReplayBuffer) as again:
            assert equal(comparable_state(again), whole)
            step(again, 48)
        return commits, disk.is_real


@pytest.mark.promise("B3")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_disk_that_fills_up_after_opening_stops_neither_adds_nor_commits(sampler: str, tmp_path: Path) -> None:
    commits, is_real = live_through_full_disk(sampler, tmp_path)
    disk = "a small file system" if is_real else "a pretended disk: nothing may be mounted here"
    tell(f"B3: {sampler}, {commits} commits and every add between them on {disk} that was full")


def test_without_reserved_commits_a_full_disk_stops_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary: without reserved space, commits on a full disk fail."""
    monkeypatch.setattr(FileOperations, "reserve", lambda *_: None)
    with pytest.raises(rl.CheckpointError, match="No space left on device"):
        live_through_full_disk("uniform", tmp_path)


@pytest.mark.promise("B3")
def test_a_disk_without_room_for_commits_is_refused_when_the_buffer_is_made(tmp_path: Path) -> None:
    refused = 0
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        if not disk.is_real:
            pytest.skip("no file system may be mounted here: a pretended one has no size")
        for nbytes in range(0, 256 << 10, 8 << 10):
            (disk.root / "other").write_bytes(bytes(nbytes))
            try:
                make_buffer(disk.root / "replay").close()
            except MemoryError:
                assert {path.name for path in disk.root.rglob("replay/*")} <= {"LOCK"}
                refused += 1
            else:
                assert not refused, "with less room it was refused"
                shutil.rmtree(disk.root / "replay")
    assert 0 < refused < 32
    tell(f"B3: {refused} of 32 disks too small for a buffer or its commits, refused when it is made")


class Growing(rl.Uniform):
    """A sampler with a state of a given number of bytes."""

    nbytes = 0

    def state(self) -> dict[str, torch.Tensor]:
        return {"more": torch.zeros(self.nbytes, dtype=torch.uint8)}


@pytest.mark.promise("B3")
def test_a_state_beyond_the_reserved_space_is_a_typed_error_that_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        replay = make_buffer(disk.root / "replay", Growing())
        sampler: Any = replay.sampler
        for t in range(10):
            step(replay, t)
        replay.commit()
        disk.fill()
        sampler.nbytes = 300_000
        whole = digest(replay)[3]
        for _ in range(3):
            with pytest.raises(rl.CheckpointError, match=r"commit to .*: expected .*No space left.* is intact"):
                replay.commit()
            assert equal(digest(replay)[3], whole)
        shutil.copytree(disk.root / "replay", tmp_path / "copy")
        sampler.nbytes = 0
        with rl.load(tmp_path / "copy", rl.ReplayBuffer, sampler=Growing()) as found:
            assert equal(digest(found)[3], whole)
        replay.commit()
        sampler.nbytes = 300_000
        disk.empty()
        replay.commit()
        replay.close()


@pytest.mark.promise("B3")
def test_a_refused_save_leaves_no_part_behind(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        if not disk.is_real:
            pytest.skip("no file system may be mounted here; the file-size limits of B2 show the same")
        replay = rl.ReplayBuffer(4000, 32, 1, seed=0)
        block = {"obs": torch.rand(3900, 32), "action": torch.rand(3900, 1), "reward": torch.rand(3900)}
        block |= {"terminated": torch.ones(3900, dtype=torch.bool), "truncated": torch.zeros(3900, dtype=torch.bool)}
        part = {name: x[:100] for name, x in block.items()}
        replay.extend({**part, "next_obs": part["obs"] + 1})
        root = disk.root / "saved"
        replay.save(root)
        files, whole = listing(root), digest(replay)
        for _ in range(3):
            replay.extend({**block, "next_obs": block["obs"] + 1})
        for nbytes in range(0, 320 << 10, 40 << 10):
            (disk.root / "other").write_bytes(bytes((1640 << 10) + nbytes))
            for _ in range(2):
                with pytest.raises(rl.CheckpointError, match="room for about .* bytes, got .* bytes free"):
                    replay.save(root)
                assert listing(root) == files
        disk.fill()
        with pytest.raises(rl.CheckpointError, match="room for about"):
            replay.save(root)
        assert listing(root) == files
        assert equal(digest(rl.load(root)), whole)
        disk.empty()
        (disk.root / "other").unlink()
        replay.save(root)
        assert equal(digest(rl.load(root)), digest(replay))
    tell("B3: 17 saves refused by a full file system, none of which left a file")


def listing(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_size for path in sorted(root.rglob("*")) if path.is_file()}
