"""Canaries: deliberately broken savers and loaders, each of which a check must detect."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.checkpoint.archive import Archive
from relive.storage.files import FileOperations
from tests.checkpoint.traffic import equal
from tests.faults.checkpoint import test_a_crashes as a
from tests.faults.checkpoint import test_c_files as c
from tests.faults.checkpoint.disk import load_digest, read_state, save_old_checkpoint

pytestmark = pytest.mark.thorough

Broken = tuple[type, str, Callable[..., Any]]


def _nothing(*_: Any) -> None: ...


def _written_in_place(self: Archive, name: str, parts: Iterable[Any]) -> None:
    """Writes files in place, without tmp/ and rename."""
    file = self.files.create(name)
    for part in parts:
        self.files.write(file, memoryview(part))
    self.files.sync(file)
    self.files.close(file)


def _commit(self: Archive, manifest: Any) -> None:
    """Writes the manifest before the folders of its data are synchronised."""
    from relive.checkpoint.archive import dump_manifest  # noqa: PLC0415

    self._write_atomically(f"manifests/{manifest.number:08}.json", [dump_manifest(manifest)])
    self.files.sync_folder("manifests")


_put = Archive.write_file


def _collecting_put(self: Archive, *arguments: Any) -> Any:
    """Removes old checkpoints before the new one is there."""
    for number in self.checkpoint_numbers():
        self.files.remove(f"manifests/{number:08}.json")
    self.files.sync_folder("manifests")
    return _put(self, *arguments)


POWER: dict[str, Broken] = {
    "files are not synchronised": (FileOperations, "sync", _nothing),
    "folders are not synchronised": (FileOperations, "sync_folder", _nothing),
    "the manifest before the data": (Archive, "commit_manifest", _commit),
    "collected before committed": (Archive, "write_file", _collecting_put),
}


@pytest.mark.parametrize("name", POWER)
def test_the_power_check_goes_red(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = POWER[name]
    save_old_checkpoint("prioritized", tmp_path / "first")
    # An operation that does nothing must be missing from the log.
    if broken[0] is FileOperations:
        original = a.after_power_loss

        def forgetful(start: Any, log: list[Any], rng: random.Random) -> Any:
            return original(start, [entry for entry in log if entry[0] != broken[1]], rng)

        monkeypatch.setattr(a, "after_power_loss", forgetful)
    else:
        monkeypatch.setattr(*broken)
    with pytest.raises((AssertionError, rl.CheckpointError)):
        a.lose_power(tmp_path, "prioritized", 8, 0)


def test_the_interrupt_check_goes_red_on_files_written_in_place_and_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Archive, "_write_atomically", _written_in_place)
    monkeypatch.setattr(Archive, "_discard_uncommitted_files", _nothing)
    with pytest.raises((AssertionError, rl.CheckpointError)):
        a.interrupt_saves(tmp_path, 20, 0)


def test_the_bit_check_goes_red_without_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relive.checkpoint.archive.require_checksum", _nothing)
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        c.flip_bits(tmp_path, 2_000, 0)


def test_the_length_check_goes_red_without_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Archive, "require_files", _nothing)
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        c.test_a_file_of_another_length_is_named("prioritized", tmp_path)


def test_the_state_check_goes_red_without_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, where in (("uniform", rl.ReplayBuffer), ("rollout", rl.RolloutBuffer)):
        with monkeypatch.context() as patch:
            save_old_checkpoint(kind, tmp_path / kind)
            patch.setattr(where, "check", _nothing)
            assert c.read_states(kind, tmp_path / kind, 150, 0)[1], kind


def test_a_loader_that_follows_links_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(self: FileOperations, name: str) -> int:
        return os.open(self.root / name, os.O_RDONLY)

    root = tmp_path / "root"
    old = save_old_checkpoint("prioritized", root)
    c.plant(root, tmp_path / "outside", "state as link")
    with pytest.raises(rl.CorruptCheckpoint):
        rl.load(root, number=2)
    monkeypatch.setattr(FileOperations, "open", follow)
    with pytest.raises(rl.CorruptCheckpoint):
        # The size of the link itself is checked first.
        rl.load(root, number=2)
    monkeypatch.setattr(FileOperations, "_read_status", lambda self, name: os.stat(self.root / name))
    assert equal(load_digest(root), old), "the canary loads what lies outside"


def test_the_simulated_disk_reproduces_a_complete_save(tmp_path: Path) -> None:
    save_old_checkpoint("distillation", tmp_path)
    recorded, start = a.RecordedSave(), read_state(tmp_path)
    buffer = a.load_and_change("distillation", tmp_path)
    a.save(buffer, tmp_path, files=recorded.files)
    log = [*recorded.log, *(("sync_folder", 0, folder) for folder in start)]
    end, real = a.after_power_loss(start, log, random.Random(0)), read_state(tmp_path)
    assert {folder: end[folder] for folder in COMMITTED} == {folder: real[folder] for folder in COMMITTED}


COMMITTED = ("manifests", "segments", "state")
