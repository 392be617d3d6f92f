"""Several buffers in one folder: each keeps and deletes its own checkpoints, and another kind is refused."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.checkpoint.archive import Archive
from relive.checkpoint.saving import save
from relive.inspector.saved import verify
from relive.storage.files import FileOperations
from tests.checkpoint.traffic import KINDS, digest, equal, make_replay, step_replay

ANOTHER = r"save to .*: checkpoints of another buffer are there, and stay"


def make_filled_replay(seed: int = 0, steps: int = 5) -> rl.ReplayBuffer:
    replay = make_replay(rl.Uniform())
    for n in range(seed, seed + steps):
        step_replay(replay, n)
    return replay


def lineages(root: Path) -> dict[int, str]:
    archive = Archive(root)
    return {number: archive.read_manifest(number).lineage for number in archive.checkpoint_numbers()}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_second_buffer_leaves_the_checkpoints_of_the_first(tmp_path: Path) -> None:
    first, second = make_filled_replay(), make_filled_replay(40)
    for _ in range(3):
        first.save(tmp_path)
    whole = digest(first)
    with pytest.warns(UserWarning, match=ANOTHER):
        second.save(tmp_path, keep=1)
    for n in range(3):
        step_replay(second, 60 + n)
        second.save(tmp_path, keep=1)
    assert list(lineages(tmp_path)) == [2, 3, 7]
    assert equal(digest(rl.load(tmp_path)), digest(second))
    assert equal(digest(rl.load(tmp_path, number=3)), whole)
    assert [error for _, error in verify(tmp_path) if error] == []


def test_buffers_that_save_in_turn_go_on_from_their_own_checkpoints(tmp_path: Path) -> None:
    buffers = [make_filled_replay(), make_filled_replay(40)]
    buffers[0].save(tmp_path)
    with pytest.warns(UserWarning, match=ANOTHER):
        buffers[1].save(tmp_path)
    for turn in range(4):
        for i, buffer in enumerate(buffers):
            step_replay(buffer, 100 + 10 * turn + i)
            number = buffer.save(tmp_path)
            assert equal(digest(rl.load(tmp_path, number=number)), digest(buffer))
            archive = Archive(tmp_path)
            # Each save has written one segment, with the new rows.
            if turn < 3:
                assert len(archive.read_manifest(number).segments) == turn + 2
    lineage_by_number = lineages(tmp_path)
    assert list(lineage_by_number) == [7, 8, 9, 10]
    assert lineage_by_number[7] == lineage_by_number[9] != lineage_by_number[8] == lineage_by_number[10]
    needed = {name for number in lineage_by_number for name in Archive(tmp_path).read_manifest(number).file_sizes}
    there = {f"{folder}/{path.name}" for folder in ("segments", "state") for path in (tmp_path / folder).iterdir()}
    assert there == needed


def test_a_buffer_that_is_saved_into_two_folders_in_turn_goes_on_in_both(tmp_path: Path) -> None:
    replay = make_filled_replay()
    for n in range(3):
        for folder in ("a", "b/../b"):
            step_replay(replay, 50 + n)
            replay.save(tmp_path / folder, keep=5)
    for folder in ("a", "b"):
        assert len(set(lineages(tmp_path / folder).values())) == 1
        assert len(Archive(tmp_path / folder).read_manifest(3).segments) == 3


def test_a_loaded_buffer_continues_its_lineage_and_copies_do_not(tmp_path: Path) -> None:
    replay = make_filled_replay()
    replay.save(tmp_path)
    loaded = rl.load(tmp_path, rl.ReplayBuffer)
    step_replay(loaded, 50)
    loaded.save(tmp_path)
    again = rl.load(tmp_path)
    again.save(tmp_path, keep=3)
    assert len(set(lineages(tmp_path).values())) == 1
    for another in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        with pytest.warns(UserWarning, match=ANOTHER):
            another.save(tmp_path)
    assert list(lineages(tmp_path)) == [1, 2, 3, 4, 5]
    assert len(set(lineages(tmp_path).values())) == 3


def test_a_pickle_refers_to_a_function_whose_name_stays() -> None:
    restore, *_ = make_filled_replay().__reduce_ex__(5)
    assert (restore.__module__, restore.__qualname__) == ("relive.checkpoint.state_dict", "_unpickled")


def test_a_run_that_was_continued_by_somebody_else_becomes_another(tmp_path: Path) -> None:
    """Two buffers that continue one checkpoint would delete each other's checkpoints."""
    replay = make_filled_replay()
    replay.save(tmp_path)
    loaded = rl.load(tmp_path)
    replay.save(tmp_path)
    with pytest.warns(UserWarning, match=ANOTHER):
        loaded.save(tmp_path, keep=1)
    with pytest.warns(UserWarning, match=ANOTHER):
        rl.load(tmp_path, number=1).save(tmp_path, keep=1)
    lineage_by_number = lineages(tmp_path)
    assert list(lineage_by_number) == [1, 2, 3, 4]
    assert lineage_by_number[1] == lineage_by_number[2]
    assert len(set(lineage_by_number.values())) == 3


def test_a_buffer_that_took_over_a_state_is_written_in_full_in_its_own_lineage(tmp_path: Path) -> None:
    replay, other = make_filled_replay(), make_filled_replay(40)
    replay.save(tmp_path)
    replay.load_state_dict(other.state_dict())
    replay.save(tmp_path, keep=1)
    assert list(lineages(tmp_path)) == [2]
    assert equal(digest(rl.load(tmp_path)), digest(other))


@pytest.mark.parametrize("kind", ["rollout", "distillation"])
def test_other_kinds_have_lineages_too(kind: str, tmp_path: Path) -> None:
    first, second = (KINDS[kind].make() for _ in range(2))
    for n in range(8):
        KINDS[kind].act(first, n)
    first.save(tmp_path)
    with pytest.warns(UserWarning, match=ANOTHER):
        second.save(tmp_path, keep=1)
    first.save(tmp_path, keep=1)
    assert list(lineages(tmp_path)) == [2, 3]
    assert equal(digest(rl.load(tmp_path, number=2)), digest(second))
    assert equal(digest(rl.load(tmp_path)), digest(first))


def test_a_manifest_that_cannot_be_read_is_of_nobody(tmp_path: Path) -> None:
    first, second = make_filled_replay(), make_filled_replay(40)
    for _ in range(2):
        first.save(tmp_path)
    (tmp_path / "manifests" / "00000002.json").write_bytes(b"rotten")
    with pytest.warns(UserWarning, match=ANOTHER):
        second.save(tmp_path)
    assert list(lineages(tmp_path)) == [1, 3]
    assert equal(digest(rl.load(tmp_path, number=1)), digest(first))
    # The save has written all rows, because the previous checkpoint was removed.
    first.save(tmp_path, keep=1)
    assert list(lineages(tmp_path)) == [3, 4]


def test_a_manifest_that_the_disk_does_not_give_may_have_continued_the_lineage(tmp_path: Path) -> None:
    """A read error may be transient: the unreadable checkpoint is neither continued nor removed."""
    replay = make_filled_replay()
    for _ in range(2):
        replay.save(tmp_path)
    newest = tmp_path / "manifests" / "00000002.json"

    class Refusing(FileOperations):
        def read(self, file: int, count: int) -> bytes:
            if os.path.samestat(os.fstat(file), newest.stat()):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(file, count)

    loaded = rl.load(tmp_path, number=1)
    with pytest.warns(UserWarning, match=ANOTHER):
        save(loaded, tmp_path, keep=1, files=Refusing)
    loaded.save(tmp_path, keep=1)
    lineage_by_number = lineages(tmp_path)
    assert list(lineage_by_number) == [1, 2, 4]
    assert lineage_by_number[1] == lineage_by_number[2] != lineage_by_number[4]


@pytest.mark.parametrize("folder", ["manifests", "state", "segments"])
def test_a_checkpoint_that_the_disk_did_not_give_to_a_load_is_not_removed(folder: str, tmp_path: Path) -> None:
    """A checkpoint that a load skipped after a read error may be valid: the next save must not remove it."""
    replay = make_filled_replay()
    replay.save(tmp_path)
    step_replay(replay, 70)
    replay.save(tmp_path)
    (newest,) = (tmp_path / folder).glob("00000002*")

    class Refusing(FileOperations):
        def open(self, name: str) -> int:
            if name == f"{folder}/{newest.name}":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().open(name)

    with pytest.warns(UserWarning, match="skipped a damaged checkpoint and loaded number 1"):
        loaded = rl.load(tmp_path, files=Refusing)
    with pytest.warns(UserWarning, match=ANOTHER):
        loaded.save(tmp_path, keep=1)
    lineage_by_number = lineages(tmp_path)
    assert list(lineage_by_number) == [1, 2, 3]
    assert lineage_by_number[1] == lineage_by_number[2] != lineage_by_number[3]
    assert equal(digest(rl.load(tmp_path, number=2)), digest(replay))


OTHERS: dict[str, Any] = {
    "another kind": lambda: rl.RolloutBuffer(4, 3, 2, 1),
    "another observation": lambda: rl.ReplayBuffer(24, 3, 1, num_envs=3),
    "another extra field": lambda: rl.ReplayBuffer(24, 2, 1, num_envs=3, extra={"tag": 1}),
    "no extra field": lambda: rl.ReplayBuffer(24, 2, 1, num_envs=3),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_kind_or_schema_is_refused_before_anything_is_written(other: str, tmp_path: Path) -> None:
    make_filled_replay().save(tmp_path)
    (tmp_path / "tmp" / "state-00000002.bin").write_bytes(b"of a save that was killed")
    before = contents(tmp_path)
    expected = r"save to .*: expected .*, as in its checkpoints, got .*\. Save into another folder"
    with pytest.raises(rl.IncompatibleCheckpoint, match=expected):
        OTHERS[other]().save(tmp_path)
    assert contents(tmp_path) == before


def test_a_distillation_buffer_learns_its_fields_between_two_saves(tmp_path: Path) -> None:
    buffer, late = rl.DistillationBuffer(4, 1), rl.DistillationBuffer(4, 1)
    buffer.save(tmp_path)
    buffer.add([0.0], [0.0], logits=[1.0])
    buffer.save(tmp_path)
    with pytest.warns(UserWarning, match=ANOTHER):
        late.save(tmp_path)
    late.add([0.0], [[0.0]])
    late.save(tmp_path)
    late.save(tmp_path)
    with pytest.raises(rl.IncompatibleCheckpoint, match=r"action .*, as in its checkpoints"):
        buffer.save(tmp_path)


def _save_in_turn(root: Path, seed: int, count: int) -> None:
    warnings.simplefilter("ignore")
    replay = make_filled_replay(seed)
    for n in range(count):
        step_replay(replay, 100 + n)
        number = replay.save(root)
        assert equal(digest(rl.load(root, number=number)), digest(replay))


def test_processes_that_save_into_one_folder_keep_their_own(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_save_in_turn, args=(tmp_path, seed, 6)) for seed in (0, 40, 80)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    lineage_by_number = lineages(tmp_path)
    assert max(lineage_by_number) == 18
    assert sorted(list(lineage_by_number.values()).count(one) for one in set(lineage_by_number.values())) == [2, 2, 2]
    assert [error for _, error in verify(tmp_path) if error] == []


def test_a_copied_folder_continues_where_it_is(tmp_path: Path) -> None:
    replay = make_filled_replay()
    replay.save(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    loaded = rl.load(tmp_path / "b")
    loaded.save(tmp_path / "b", keep=1)
    replay.save(tmp_path / "a", keep=1)
    assert list(lineages(tmp_path / "a")) == list(lineages(tmp_path / "b")) == [2]


def test_a_buffer_loaded_in_place_of_a_damaged_one_continues_the_lineage(tmp_path: Path) -> None:
    replay = make_filled_replay()
    for n in range(3):
        step_replay(replay, 50 + n)
        replay.save(tmp_path, keep=5)
    state = tmp_path / "state" / "00000003.bin"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint and loaded number 2"):
        loaded = rl.load(tmp_path)
    loaded.save(tmp_path, keep=2)
    assert len(set(lineages(tmp_path).values())) == 1
    assert list(lineages(tmp_path)) == [2, 4]
    assert equal(digest(rl.load(tmp_path)), digest(loaded))
