"""The format is read before the contents: old formats always load, newer ones raise an IncompatibleCheckpoint."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive import kernels
from relive.checkpoint import archive
from relive.schema.fields import Field
from relive.storage import codec, disk
from tests.checkpoint.traffic import KINDS, equal

GOLDEN = Path(__file__).parent / "golden"
NEEDS_DISK = pytest.mark.skipif(
    kernels.native() is None or sys.platform != "linux", reason="disk memory needs Linux and the native core"
)


def with_format(version: int, data: bytes) -> bytes:
    """Change the format in the first line of a document."""
    return data.replace(b"recollect 1 ", b"recollect %d " % version, 1)


@pytest.fixture
def newer_readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Register a reader of format 2 for checkpoints and disk memory; returns a list of the files it has read."""
    read: list[str] = []

    def second(where: str, *rest: Any) -> Any:
        read.append(where)
        raise rl.CorruptCheckpoint(f"{where}: read as format 2")

    monkeypatch.setattr(archive, "READERS", archive.READERS | {2: second})
    monkeypatch.setattr(disk, "READERS", disk.READERS | {2: second})
    return read


@pytest.mark.parametrize("kind", ["prioritized", "rollout", "distillation"])
def test_a_reader_of_format_2_leaves_format_1_as_it_is(kind: str, tmp_path: Path, newer_readers: list[str]) -> None:
    shutil.copytree(GOLDEN / "format-1" / kind, tmp_path / kind)
    buffer: Any = rl.load(tmp_path / kind)
    buffer.check()
    assert not newer_readers
    (path,) = (tmp_path / kind / "manifests").iterdir()
    path.write_bytes(with_format(2, path.read_bytes()))
    with pytest.raises(rl.CorruptCheckpoint, match="read as format 2"):
        rl.load(tmp_path / kind)
    assert newer_readers == [f"manifests/{path.name}"]


@NEEDS_DISK
def test_a_reader_of_disk_format_2_leaves_format_1_as_it_is(tmp_path: Path, newer_readers: list[str]) -> None:
    shutil.copytree(GOLDEN / "disk-1" / "uniform", tmp_path / "memory")
    with rl.load(tmp_path / "memory", rl.ReplayBuffer) as replay:
        replay.check()
    assert not newer_readers
    for name in disk.COMMIT_FILES:
        path = tmp_path / "memory" / name
        path.write_bytes(with_format(2, path.read_bytes()))
    with pytest.raises(rl.CorruptCheckpoint, match="read as format 2"):
        rl.load(tmp_path / "memory")
    assert newer_readers


def test_a_writer_of_format_2_continues_a_folder_of_format_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = KINDS["uniform"]
    old, new = subject.make(), subject.make()
    for n in range(20):
        subject.act(old, n)
        subject.act(new, n + 100)
    old.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(archive, "READERS", archive.READERS | {2: archive.READERS[1]})
        for module in (codec, archive):
            patch.setattr(module, "FORMAT", 2)
        with pytest.warns(UserWarning, match="checkpoints of another buffer are there, and stay"):
            number = new.save(tmp_path)
        assert (tmp_path / "FORMAT").read_bytes() == b"recollect checkpoint 2\n"
        assert equal(subject.read(rl.load(tmp_path, number=number - 1)), subject.read(old))
    with pytest.raises(rl.IncompatibleCheckpoint, match="FORMAT: expected format 1 at most, got 2"):
        rl.load(tmp_path)


@NEEDS_DISK
def test_disk_memory_of_a_newer_format_does_not_fit_here(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "disk-1" / "uniform", tmp_path / "memory")
    (tmp_path / "memory" / "FORMAT").write_bytes(b"recollect disk memory 2\n")
    with pytest.raises(rl.IncompatibleCheckpoint, match="format 1 at most, got 2"):
        rl.ReplayBuffer(4, 1, (), device=rl.Memory.disk(tmp_path / "memory"))


def test_a_carry_of_every_few_steps_is_refused_with_a_sentence() -> None:
    """Settings that format 1 could contain before the first release."""
    read = rl.Carry.with_settings
    assert read(Field(3), [codec.Node("every", 1)]) == rl.Carry(3)
    with pytest.raises(
        rl.IncompatibleCheckpoint, match=r"Carry: expected a state of every step, got one every 2 steps"
    ):
        read(Field(3), [codec.Node("every", 2)])
