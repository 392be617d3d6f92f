"""C13: a writer changes no file or folder of the user, neither beside its target nor at the target."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.datasets import files
from tests.datasets.formats import FORMATS, make_replay


@pytest.fixture
def replay() -> rl.ReplayBuffer:
    return make_replay({"obs": 2, "action": 1}, [(4, "terminated")] * 2)


def make_neighbours(folder: Path, name: str) -> None:
    """Make files and folders with every name that a writer may use."""
    for other in (f"{name}.unfinished", f"{name}.tmp", f"{name}~", f".{name}", f"{name}.part", ".relive-", "tmp"):
        (folder / other).write_text("mine")
        (folder / f"{other}.d" / name).mkdir(parents=True)
        (folder / f"{other}.d" / name / "file").write_text("mine")


def read_tree(folder: Path) -> dict[str, str | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes().hex() if path.is_file() else None for path in folder.rglob("*")
    }


@pytest.mark.promise("C13")
@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", FORMATS)
def test_files_beside_the_target_stay(name: str, kind: str, folder: Path, replay: rl.ReplayBuffer) -> None:
    make_neighbours(folder, name)
    if kind == "folder":
        (folder / f"{name}.unfinished").unlink()
        (folder / f"{name}.unfinished" / "data").mkdir(parents=True)
        (folder / f"{name}.unfinished" / "data" / "file").write_text("mine")
    before = read_tree(folder)
    FORMATS[name].write(replay, folder / name)
    neighbours_after = {path: body for path, body in read_tree(folder).items() if path.split("/")[0] != name}
    assert (folder / name).exists()
    for path in [path for path in neighbours_after if path.endswith("namespace_metadata.json")]:
        del neighbours_after[path]
    assert neighbours_after == before


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_writer_that_is_interrupted_leaves_nothing(
    name: str, error: BaseException, folder: Path, replay: rl.ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_neighbours(folder, name)
    before = read_tree(folder)

    def read_one_episode(replay: Any) -> Any:
        yield next(files.read_episode_arrays(replay))
        raise error

    monkeypatch.setattr(FORMATS[name].module, "read_episode_arrays", read_one_episode)
    with pytest.raises(type(error)):
        FORMATS[name].write(replay, folder / name)
    assert read_tree(folder) == before


@pytest.mark.parametrize("name", FORMATS)
def test_an_existing_target_is_refused_and_stays(name: str, folder: Path, replay: rl.ReplayBuffer) -> None:
    for make in (Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")):
        make(folder / name)
        before = read_tree(folder)
        # Minari raises a ValueError, all others an OSError.
        with pytest.raises((OSError, ValueError)):
            FORMATS[name].write(replay, folder / name)
        assert read_tree(folder) == before
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "minari-v0"])
def test_one_of_two_writers_to_the_same_path_writes_a_whole_dataset(
    name: str, folder: Path, replay: rl.ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(2)
    raised: list[BaseException] = []

    def wait_for_other_writer(replay: Any) -> Any:
        barrier.wait(60)
        yield from files.read_episode_arrays(replay)
        barrier.wait(60)

    def write() -> None:
        try:
            FORMATS[name].write(replay, folder / name)
        except FileExistsError as error:
            raised.append(error)

    monkeypatch.setattr(FORMATS[name].module, "read_episode_arrays", wait_for_other_writer)
    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(raised) == 1
    assert [path.name for path in folder.iterdir()] == [name]
    monkeypatch.undo()
    FORMATS[name].write(replay, folder / f"alone-{name}")
    assert dict.fromkeys(read_tree(folder / name)) == dict.fromkeys(read_tree(folder / f"alone-{name}"))
