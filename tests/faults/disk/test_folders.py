"""Disk folders that are foreign, damaged or open elsewhere: typed errors, and never a wrong row."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.cli import main
from relive.inspector.saved import peek
from relive.storage.disk import read_newest_commit
from relive.storage.files import FileOperations
from tests.faults.disk.writer import Layout, Life, Story, verify, write
from tests.faults.processes import apart
from tests.tiers import select
from tests.totals import SEED, tell, trials

LAYOUT = Layout(3, 40, options={"sampler": rl.Prioritized()})


def make_disk_memory(root: Path, turns: int = 60, *, closes: bool = True) -> list[Any]:
    """Create disk memory with rows; return the arguments of `verify`."""
    layout = LAYOUT
    replay, clock = layout.make(rl.Memory.disk(root)), np.zeros(layout.envs, np.int64)
    for turn in range(turns):
        write(replay, Story(layout, [0]), clock, turn)
    if closes:
        replay.close()
    return [(0, clock, clock)]


def outcome(root: Path, lives: list[Any]) -> str:
    """Load a damaged folder and return the outcome; a wrong row is an AssertionError."""
    try:
        replay = rl.load(root, rl.ReplayBuffer)
    except rl.CheckpointError as error:
        return type(error).__name__ if ": expected " in str(error) or "invalid. " in str(error) else "unexplained"
    try:
        replay.check()
    except rl.InvariantError:
        return "found by check"
    layout = LAYOUT
    verify(replay, Story(layout, [0]), [(0, np.zeros(layout.envs, np.int64), lives[0][2])], lives[0][1])
    return "exact"


def damage(root: Path, template: Path) -> None:
    if root.exists():
        shutil.rmtree(root)
    shutil.copytree(template, root)


def test_files_of_another_length_are_refused(tmp_path: Path) -> None:
    lives = make_disk_memory(tmp_path / "whole")
    count = 0
    for path in sorted((tmp_path / "whole").iterdir()):
        for change in (-1, 1, -4096, 4096, None):
            damage(tmp_path / "damaged", tmp_path / "whole")
            size = path.stat().st_size
            if path.name == "LOCK" or (change is not None and size + change < 0):
                continue
            file = tmp_path / "damaged" / path.name
            if change is None:
                file.unlink()
            else:
                os.truncate(file, size + change)
            found = outcome(tmp_path / "damaged", lives)
            # One of two commits suffices. Without the newer one, which records the close, later rows are verified.
            may_be = {"CorruptCheckpoint", "exact"} if path.name.startswith("commit") else {"CorruptCheckpoint"}
            may_be |= {"NoCheckpoint", "IncompatibleCheckpoint"} if path.name == "FORMAT" else set()
            assert found in may_be, (path.name, change, found)
            count += 1
    tell(f"disk memory: {count} files of another length, none taken")


@pytest.mark.parametrize(("closes", "count"), select((True, 50), of=[(True, 50), (True, 150), (False, 150)]))
def test_a_flipped_bit_is_found_or_harmless(tmp_path: Path, closes: bool, count: int) -> None:
    lives = make_disk_memory(tmp_path / "whole", closes=closes)
    rng, outcomes = random.Random(SEED), Counter[str]()
    files = [path for path in sorted((tmp_path / "whole").iterdir()) if path.stat().st_size]
    for trial in range(trials("DISK_BITS", count)):
        damage(tmp_path / "damaged", tmp_path / "whole")
        file = tmp_path / "damaged" / files[trial % len(files)].name
        data = np.memmap(file, np.uint8, "r+")
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        del data
        found = outcome(tmp_path / "damaged", lives)
        is_row = file.name.startswith(("column", "seals"))
        outcomes[f"{'rows' if is_row else 'numbers'}: {found}"] += 1
        if closes and not is_row and not file.name.startswith("commit"):
            assert found in ("CorruptCheckpoint", "IncompatibleCheckpoint", "NoCheckpoint"), file.name
    tell(f"disk memory: flipped bits, {'closed' if closes else 'left open'}: {dict(outcomes)}, seed {SEED}")
    assert sum(outcomes.values()) == trials("DISK_BITS", count)


def test_check_detects_every_flipped_bit_of_a_stored_row(tmp_path: Path) -> None:
    make_disk_memory(tmp_path / "whole")
    layout, rng = LAYOUT, random.Random(SEED)
    with rl.load(tmp_path / "whole", rl.ReplayBuffer) as replay:
        slots = replay.storage.locate(replay.ids()).tolist()
    for _ in range(40):
        damage(tmp_path / "damaged", tmp_path / "whole")
        file = tmp_path / "damaged" / f"column{rng.randrange(6)}"
        data = np.memmap(file, np.uint8, "r+")
        width = len(data) // ((layout.rows + 1) * layout.envs)
        data[rng.choice(slots) * width + rng.randrange(width)] ^= 1 << rng.randrange(8)
        del data
        assert outcome(tmp_path / "damaged", []) in ("found by check", "CorruptCheckpoint")


@pytest.mark.parametrize("what", ["symlink", "fifo", "folder"])
def test_folders_with_foreign_files_are_refused(tmp_path: Path, what: str) -> None:
    make_disk_memory(tmp_path / "memory")
    target = tmp_path / "memory" / "column0"
    shutil.move(target, tmp_path / "elsewhere")
    if what == "symlink":
        target.symlink_to(tmp_path / "elsewhere")
    elif what == "fifo":
        os.mkfifo(target)
    elif what == "folder":
        target.mkdir()
    with pytest.raises((rl.CorruptCheckpoint, rl.IncompatibleCheckpoint)):
        rl.load(tmp_path / "memory")


def test_a_folder_with_other_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("42")
    with pytest.raises(rl.IncompatibleCheckpoint, match="expected a folder for disk memory, got 'thesis.tex' in it"):
        LAYOUT.make(rl.Memory.disk(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("beside", ["LOCK", "LOCK and FORMAT.new", "FORMAT"])
@pytest.mark.parametrize("name", ["thesis", "makefile", "notes2", "column0"])
def test_files_without_an_extension_are_not_swept(tmp_path: Path, beside: str, name: str) -> None:
    for each in beside.split(" and "):
        (tmp_path / each).write_text("mine")
    if name == "column0":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / name).write_text("42")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises((rl.IncompatibleCheckpoint, rl.CorruptCheckpoint), match="expected .*, got .*"):
        LAYOUT.make(rl.Memory.disk(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_remains_of_an_interrupted_creation_are_removed(tmp_path: Path) -> None:
    for name in ("LOCK", "column0", "ring.head", "sampler.numbers", "FORMAT.new"):
        (tmp_path / name).write_bytes(b"half")
    make_disk_memory(tmp_path)
    assert not (tmp_path / "FORMAT.new").exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("head", lambda values: values.__setitem__(0, 2**62)),
        ("head", lambda values: values.__setitem__(0, -5)),
        ("floor", lambda values: values.__setitem__(1, 2**40)),
        ("journal", lambda values: values.__setitem__(2, 2**63 - 1)),
        ("journal", lambda values: values.__setitem__(2, -7)),
        ("count", lambda values: values.fill(2**33)),
    ],
)
def test_numbers_that_lead_out_of_the_memory_are_not_followed(tmp_path: Path, name: str, change: Any) -> None:
    lives = make_disk_memory(tmp_path / "memory", closes=False)
    values = np.memmap(tmp_path / "memory" / f"ring.{name}", np.int64, "r+")
    change(values)
    del values
    assert outcome(tmp_path / "memory", lives) in ("exact", "CorruptCheckpoint")


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_folder_without_a_format_file_is_not_emptied(tmp_path: Path, damage: str) -> None:
    make_disk_memory(tmp_path / "memory")
    if damage == "missing":
        (tmp_path / "memory" / "FORMAT").unlink()
    else:
        (tmp_path / "memory" / "FORMAT").write_text("relive disc memory 1")
    before = {path.name: path.read_bytes() for path in (tmp_path / "memory").iterdir()}
    place = "FORMAT: expected " if damage == "missing" else "FORMAT, bytes 0 to "
    for make in (LAYOUT.make, lambda _: peek(tmp_path / "memory")):
        with pytest.raises(rl.CorruptCheckpoint, match=place):
            make(rl.Memory.disk(tmp_path / "memory"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "memory").iterdir()} == before


def test_two_damaged_commits_are_corrupt(tmp_path: Path) -> None:
    lives = make_disk_memory(tmp_path / "memory")
    older = tmp_path / "memory" / ("commit0", "commit1")[read_newest_commit(tmp_path / "memory").number % 2 - 1]
    older.write_bytes(b"no commit")
    assert outcome(tmp_path / "memory", lives) == "exact"
    for path in (tmp_path / "memory").glob("commit?"):
        path.write_bytes(b"recollect 1 00000000\n{}")
    with pytest.raises(rl.CorruptCheckpoint, match="^commit0.*: expected the checksum 00000000, got [0-9a-f]{8}"):
        rl.load(tmp_path / "memory")


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"capacity": 240}, "capacity"),
        ({"num_envs": 4}, "num_envs"),
        ({"obs": 3}, "obs"),
        ({"action": 2}, "action"),
        ({"extra": {"tag": 1}}, "extra"),
        ({"sampler": rl.Uniform()}, "sampler"),
        ({"autoreset": "NEXT_STEP"}, "autoreset"),
        ({"next_obs": "stored"}, "next_obs"),
    ],
)
def test_another_declaration_is_refused_with_the_difference(tmp_path: Path, options: Any, where: str) -> None:
    settings: dict[str, Any] = {"capacity": 120, "obs": 2, "action": 1, "num_envs": 3, "sampler": rl.Prioritized()}
    with rl.ReplayBuffer(**settings, device=rl.Memory.disk(tmp_path / "memory")):
        pass
    before = {path.name: path.read_bytes() for path in (tmp_path / "memory").iterdir()}
    with pytest.raises(rl.IncompatibleCheckpoint, match=f"^{where} of the buffer in .*: expected .*, got "):
        rl.ReplayBuffer(**{**settings, **options}, device=rl.Memory.disk(tmp_path / "memory"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "memory").iterdir()} == before


def test_only_one_process_may_open_a_folder(tmp_path: Path) -> None:
    replay = LAYOUT.make(rl.Memory.disk(tmp_path / "memory"))
    with pytest.raises(AssertionError, match="expected one process at a time, got a folder that another process uses"):
        apart(open_and_close, tmp_path / "memory")
    with pytest.raises(rl.CheckpointError, match="one process at a time"):
        rl.load(tmp_path / "memory")
    assert main(["check", str(tmp_path / "memory")]) == 1
    replay.close()
    apart(open_and_close, tmp_path / "memory")


def open_and_close(root: Path) -> None:
    rl.load(root, rl.ReplayBuffer).close()


def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path) -> None:
    replay = LAYOUT.make(rl.Memory.disk(tmp_path / "memory"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    # Deleting the buffer without close() leaves the folder as after a kill, but unlocked.
    del replay
    try:
        rl.load(tmp_path / "memory", rl.ReplayBuffer).close()
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)


def test_a_full_disk_is_an_error_when_the_buffer_is_made(tmp_path: Path) -> None:
    def limited(nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    told = 0
    try:
        for nbytes in np.geomspace(64, 1 << 19, 20).astype(int).tolist():
            limited(nbytes)
            root = tmp_path / f"{nbytes}"
            with pytest.raises(MemoryError, match=r"expected room for at least [\d,]+ bytes, got [\d,]+ bytes free"):
                rl.ReplayBuffer(4096, 64, 1, device=rl.Memory.disk(root))
            assert not [path for path in root.iterdir() if path.name != "LOCK"]
            told += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert told == 20
    with rl.ReplayBuffer(4096, 64, 1, device=rl.Memory.disk(tmp_path / "64")):
        pass


def test_more_than_the_disk_has_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"capacity: expected at most [\d.]+ GiB, .* got [\d.]+ GiB"):
        rl.ReplayBuffer(1 << 40, 64, 1, device=rl.Memory.disk(tmp_path / "memory"))
    assert not (tmp_path / "memory").exists()


def fail_reads_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reads of a file fail."""
    whole = FileOperations.open

    def fail(files: FileOperations, wanted: str) -> int:
        if wanted == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(files, wanted)

    monkeypatch.setattr(FileOperations, "open", fail)


def test_an_unreadable_commit_does_not_count_as_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error may be temporary: falling back to the older commit would lose acknowledged rows."""
    lives = make_disk_memory(tmp_path / "memory")
    before = {path.name: path.read_bytes() for path in (tmp_path / "memory").iterdir()}
    with monkeypatch.context() as patch:
        fail_reads_of(read_newest_commit(tmp_path / "memory").name, patch)
        with pytest.raises(rl.CorruptCheckpoint, match="^commit[01]: expected a file that can be read, got "):
            rl.load(tmp_path / "memory")
    assert {path.name: path.read_bytes() for path in (tmp_path / "memory").iterdir()} == before
    assert outcome(tmp_path / "memory", lives) == "exact"


@pytest.mark.parametrize("name", ["commit0", "commit1"])
def test_an_unreadable_commit_deletes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make_disk_memory(tmp_path / "memory")
    (tmp_path / "memory" / "FORMAT").unlink()
    others = [other for other in ("commit0", "commit1") if other != name]
    (tmp_path / "memory" / others[0]).unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "memory").iterdir()}
    fail_reads_of(name, monkeypatch)
    with pytest.raises(rl.CorruptCheckpoint, match="expected "):
        LAYOUT.make(rl.Memory.disk(tmp_path / "memory"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "memory").iterdir()} == before


def ten_steps(root: Path) -> tuple[rl.ReplayBuffer, Story, list[Life]]:
    """Create disk memory with ten steps; return the buffer and the arguments of `verify`."""
    clock, story = np.zeros(3, np.int64), Story(LAYOUT, [0])
    replay = LAYOUT.make(rl.Memory.disk(root))
    for turn in range(10):
        write(replay, story, clock, turn)
    return replay, story, [(0, clock, clock)]


@pytest.mark.parametrize("operation", ["rename", "overwrite", "sync_folder", "sync_data"])
def test_a_disk_that_fails_before_rows_are_replaced_loses_none_of_them(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, story, lives = ten_steps(tmp_path / "memory")
    state = replay.state_dict()
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            patch.undo()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(FileOperations, operation, fail)
        with pytest.raises((OSError, rl.CheckpointError)):
            replay.load_state_dict(state)
    replay.close()
    verify(rl.load(tmp_path / "memory", rl.ReplayBuffer), story, lives)


@pytest.mark.parametrize("operation", ["sync_data", "overwrite"])
def test_a_disk_that_fails_at_a_commit_raises(tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, story, lives = ten_steps(tmp_path / "memory")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(f"relive.storage.files.FileOperations.{operation}", fail)
        with pytest.raises(rl.CheckpointError, match="Input/output error"):
            replay.commit()
    verify(replay, story, lives)
    replay.close()
    verify(rl.load(tmp_path / "memory", rl.ReplayBuffer), story, lives)
