"""Hostile Minari datasets: HDF5 objects that refer to other files, or declare missing data, are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.cli import main
from relive.datasets import from_minari, to_minari

minari = pytest.importorskip("minari", reason='needs Minari: pip install ".[minari]"')
h5py = pytest.importorskip("h5py", reason='needs the files of Minari: pip install ".[minari]"')

SECRET = b"0123456789abcdefghijklmnopqrstuvwxyz" * 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small dataset, and a secret file beside the folder."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    replay = rl.ReplayBuffer(8, 2, 1, seed=0)
    for t in range(4):
        replay.add(np.full(2, t), np.zeros(1), float(t), t == 3, False, np.full(2, t + 1))
    to_minari(replay, "small-v0")
    (tmp_path / "secret").write_bytes(SECRET)
    with h5py.File(tmp_path / "secret.hdf5", "w") as file:
        file["rewards"] = np.frombuffer(SECRET[:32], np.float64)
    return tmp_path / "minari" / "small-v0" / "data"


def _external(episode: Any, outside: Path) -> None:
    del episode["rewards"]
    episode.create_dataset("rewards", (4,), np.float64, external=[(str(outside / "secret"), 0, 32)])


def _external_link(episode: Any, outside: Path) -> None:
    del episode["rewards"]
    episode["rewards"] = h5py.ExternalLink(str(outside / "secret.hdf5"), "/rewards")


def _virtual(episode: Any, outside: Path) -> None:
    del episode["rewards"]
    layout = h5py.VirtualLayout((4,), np.float64)
    layout[:] = h5py.VirtualSource(str(outside / "secret.hdf5"), "rewards", (4,))
    episode.create_virtual_dataset("rewards", layout)


def _soft_link(episode: Any, outside: Path) -> None:
    del episode["rewards"]
    episode["rewards"] = h5py.SoftLink("/episode_0/terminations")


def _cycle(episode: Any, outside: Path) -> None:
    episode.create_group("infos")["again"] = episode


def _no_bytes(episode: Any, outside: Path) -> None:
    del episode["rewards"]
    episode.create_dataset("rewards", (1 << 28,), np.float64)


def _few_chunks(episode: Any, outside: Path) -> None:
    del episode["rewards"]
    episode.create_dataset("rewards", (1 << 28,), np.float64, chunks=(4,))[:4] = 1.0


def _deep(episode: Any, outside: Path) -> None:
    group = episode.create_group("infos")
    for _ in range(200):
        group = group.create_group("x")


HOSTILE: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "external data": (_external, "expected data in this file, got external data in"),
    "an external link": (_external_link, "expected an object of this file, got a link to"),
    "a virtual dataset": (_virtual, "expected data in this file, got a virtual dataset"),
    "a soft link": (_soft_link, "expected an object of this file, got a link to"),
    "a cycle": (_cycle, "expected a tree of objects, got an object met twice"),
    "a shape without bytes": (_no_bytes, "with fewer stored bytes"),
    "a shape with few bytes": (_few_chunks, "with fewer stored bytes"),
    "groups without end": (_deep, "expected a tree of objects, got an object met twice, or groups nested too deeply"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_dataset_that_refers_to_other_files_is_refused(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, words = HOSTILE[name]
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        forge(file["episode_0"], tmp_path)
    for dataset in (folder, "small-v0", minari.MinariDataset(folder)):
        with pytest.raises(rl.SchemaError, match=words):
            from_minari(dataset)
    page = tmp_path / "page.html"
    assert main(["inspect", str(folder), "--html", str(page)]) == 1
    assert words in capsys.readouterr().err
    assert not page.exists()


def test_an_ordinary_dataset_is_read(folder: Path) -> None:
    for dataset in (folder, folder.parent, "small-v0", minari.MinariDataset(folder)):
        assert len(from_minari(dataset)) == 4


def test_a_file_that_is_no_hdf5_is_refused(folder: Path) -> None:
    (folder / "main_data.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(rl.SchemaError, match="expected an HDF5 file that can be read"):
        from_minari(folder)


def test_the_environment_of_a_dataset_is_not_made(folder: Path, tmp_path: Path) -> None:
    """An environment's entry point is any function of any module, called with any arguments."""
    metadata = json.loads((folder / "metadata.json").read_text())
    del metadata["observation_space"]
    spec = {
        "id": "x-v0", "entry_point": "pathlib:Path.touch", "kwargs": {"self": str(tmp_path / "ran")},
        "reward_threshold": None, "nondeterministic": False, "max_episode_steps": None, "order_enforce": False,
        "disable_env_checker": True, "additional_wrappers": [], "vector_entry_point": None,
    }  # fmt: skip
    metadata["env_spec"] = json.dumps(spec)
    (folder / "metadata.json").write_text(json.dumps(metadata))
    for dataset in (folder, "small-v0"):
        with pytest.raises(
            rl.SchemaError, match="expected the key 'observation_space', got no such key. Minari would create its"
        ):
            from_minari(dataset)
