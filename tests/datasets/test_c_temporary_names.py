"""C13: a writer changes no file or folder of the user, neither beside its target nor at the target."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.datasets import files, hdf5, lerobot, minari, to_hdf5, to_lerobot, to_minari, to_zarr, zarr

pytest.importorskip("h5py", reason='needs HDF5: pip install ".[hdf5]"')
pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')
pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')
pytest.importorskip("minari", reason='needs Minari: pip install ".[minari]"')

WRITERS: dict[str, tuple[Callable[[rl.ReplayBuffer, Path], Any], Any]] = {
    "f.hdf5": (to_hdf5, hdf5),
    "d4rl.hdf5": (lambda replay, path: to_hdf5(replay, path, layout="d4rl"), hdf5),
    "s.zarr": (to_zarr, zarr),
    "s.zip": (to_zarr, zarr),
    "set": (lambda replay, path: to_lerobot(replay, path, fps=10), lerobot),
    "small-v0": (lambda replay, path: to_minari(replay, path.name), minari),
}
"""For each file name, its writer and the module in which the writer reads episodes."""


@pytest.fixture
def replay() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(16, 2, 1, seed=0)
    for t in range(8):
        replay.add([t, t], [0.0], float(t), t % 4 == 3, False, [t + 1, t + 1])
    return replay


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


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
@pytest.mark.parametrize("name", WRITERS)
def test_files_beside_the_target_stay(name: str, kind: str, folder: Path, replay: rl.ReplayBuffer) -> None:
    make_neighbours(folder, name)
    if kind == "folder":
        (folder / f"{name}.unfinished").unlink()
        (folder / f"{name}.unfinished" / "data").mkdir(parents=True)
        (folder / f"{name}.unfinished" / "data" / "file").write_text("mine")
    before = read_tree(folder)
    WRITERS[name][0](replay, folder / name)
    neighbours_after = {path: body for path, body in read_tree(folder).items() if path.split("/")[0] != name}
    assert (folder / name).exists()
    for path in [path for path in neighbours_after if path.endswith("namespace_metadata.json")]:
        del neighbours_after[path]
    assert neighbours_after == before


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_is_interrupted_leaves_nothing(
    name: str, error: BaseException, folder: Path, replay: rl.ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_neighbours(folder, name)
    before = read_tree(folder)

    def read_one_episode(replay: Any) -> Any:
        yield next(files.episode_arrays(replay))
        raise error

    monkeypatch.setattr(WRITERS[name][1], "episode_arrays", read_one_episode)
    with pytest.raises(type(error)):
        WRITERS[name][0](replay, folder / name)
    assert read_tree(folder) == before


@pytest.mark.parametrize("name", WRITERS)
def test_an_existing_target_is_refused_and_stays(name: str, folder: Path, replay: rl.ReplayBuffer) -> None:
    for make in (Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")):
        make(folder / name)
        before = read_tree(folder)
        # Minari raises a ValueError, all others an OSError.
        with pytest.raises((OSError, ValueError)):
            WRITERS[name][0](replay, folder / name)
        assert read_tree(folder) == before
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "small-v0"])
def test_one_of_two_writers_to_the_same_path_writes_a_whole_dataset(
    name: str, folder: Path, replay: rl.ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(2)
    raised: list[BaseException] = []

    def wait_for_other_writer(replay: Any) -> Any:
        barrier.wait(60)
        yield from files.episode_arrays(replay)
        barrier.wait(60)

    def write() -> None:
        try:
            WRITERS[name][0](replay, folder / name)
        except FileExistsError as error:
            raised.append(error)

    monkeypatch.setattr(WRITERS[name][1], "episode_arrays", wait_for_other_writer)
    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(raised) == 1
    assert [path.name for path in folder.iterdir()] == [name]
    monkeypatch.undo()
    WRITERS[name][0](replay, folder / f"alone-{name}")
    assert dict.fromkeys(read_tree(folder / name)) == dict.fromkeys(read_tree(folder / f"alone-{name}"))
