"""Folders with foreign files: `save` deletes none of them, and refuses a folder that is no checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import relive as rl
from relive.checkpoint.archive import Archive
from tests.checkpoint.traffic import KINDS, digest, equal

THEIRS = ("tmp/thesis.tex", "state/optimizer.pt", "segments/video.mp4", "manifests/notes.txt", "model.pt", "FORMAT")


def contents(root: Path) -> dict[str, bytes | str]:
    """Return every file and link below a folder."""
    found = sorted(path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in found
    }


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"42")


@pytest.mark.parametrize("names", [THEIRS[:3], *((name,) for name in THEIRS)], ids=str)
def test_a_folder_that_is_not_ours_is_refused_and_stays_as_it_is(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        put(tmp_path / name)
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    with pytest.raises(rl.CheckpointError, match="expected .*, got .*"):
        KINDS["uniform"].make().save(tmp_path)
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == before


def test_the_files_of_a_checkpoint_without_its_format_are_not_ours(tmp_path: Path) -> None:
    KINDS["uniform"].make().save(tmp_path)
    (tmp_path / "FORMAT").unlink()
    before = contents(tmp_path)
    with pytest.raises(rl.CheckpointError, match="expected a folder of checkpoints, got 'manifests/00000001.json' in"):
        KINDS["uniform"].make().save(tmp_path)
    assert contents(tmp_path) == before


def test_disk_memory_is_no_folder_for_checkpoints(tmp_path: Path) -> None:
    with rl.ReplayBuffer(8, 2, 1, device=rl.Memory.disk(tmp_path)) as replay:
        before = {path.name for path in tmp_path.iterdir()}
        with pytest.raises(
            rl.IncompatibleCheckpoint, match="FORMAT: expected the kind .checkpoint., got .disk memory."
        ):
            replay.save(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("left", [(), ("LOCK",), ("tmp/FORMAT",), ("LOCK", "tmp/FORMAT")], ids=str)
def test_remains_of_an_interrupted_first_save_are_reused(tmp_path: Path, left: tuple[str, ...]) -> None:
    for folder in ("manifests", "segments", "state", "tmp"):
        (tmp_path / folder).mkdir()
    for name in left:
        put(tmp_path / name)
    buffer = KINDS["uniform"].make()
    buffer.save(tmp_path)
    assert equal(digest(rl.load(tmp_path)), digest(buffer))


def test_clean_up_leaves_foreign_files_alone(tmp_path: Path) -> None:
    root, outside = tmp_path / "checkpoints", tmp_path / "outside"
    outside.write_bytes(b"precious")
    kind = KINDS["uniform"]
    buffer = kind.make()
    buffer.save(root)
    theirs = [name for name in THEIRS if name != "FORMAT"]
    theirs += ["tmp/00000001.bin", "segments/00000001.bin", "segments/00000001-0.bin.bak", "state/00000001-0.bin"]
    for name in theirs:
        put(root / name)
    links = ["tmp/state-00000009.bin", "segments/00000009-0.bin", "state/00000009.bin"]
    for name in links:
        (root / name).symlink_to(outside)
    (root / "tmp" / "segments-00000009-0.bin").mkdir()
    swept = ["tmp/state-00000007.bin", "tmp/segments-00000007-1.bin", "tmp/manifests-00000007.json"]
    collected = ["segments/00000007-0.bin", "state/00000007.bin"]
    for name in [*swept, *collected]:
        put(root / name)
    for n in range(4):
        kind.act(buffer, n)
        buffer.save(root, keep=1)
    after = contents(root)
    assert {*theirs, *links} < after.keys()
    assert not {*swept, *collected} & after.keys()
    assert (root / "tmp" / "segments-00000009-0.bin").is_dir()
    assert outside.read_bytes() == b"precious"
    assert equal(digest(rl.load(root)), digest(buffer))


def test_a_linked_manifest_is_not_removed(tmp_path: Path) -> None:
    buffer = KINDS["uniform"].make()
    buffer.save(tmp_path / "root")
    put(tmp_path / "outside.json")
    (tmp_path / "root" / "manifests" / "00000002.json").symlink_to(tmp_path / "outside.json")
    buffer.save(tmp_path / "root", keep=1)
    assert Archive(tmp_path / "root").checkpoint_numbers() == [2, 3]
    assert (tmp_path / "outside.json").exists()
