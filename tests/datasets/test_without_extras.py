"""Without the library of a format, an error says how to install it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.cli import main
from relive.datasets import from_hdf5, from_lerobot, from_minari, from_zarr, to_hdf5, to_lerobot, to_minari, to_zarr

SAMPLES = Path(__file__).parent / "samples"


def small_replay() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(9, obs=1, action=1)
    replay.add([0], [0], 0.0, True, False, next_obs=[1])
    return replay


@pytest.mark.parametrize(
    ("title", "extra", "call"),
    [
        ("h5py", "hdf5", lambda path: from_hdf5(SAMPLES / "d4rl.hdf5")),
        ("h5py", "hdf5", lambda path: to_hdf5(small_replay(), path / "x")),
        ("numcodecs", "zarr", lambda path: from_zarr(SAMPLES / "diffusion_policy.zarr")),
        ("numcodecs", "zarr", lambda path: to_zarr(small_replay(), path / "x")),
        ("pyarrow", "lerobot", lambda path: from_lerobot(SAMPLES / "lerobot")),
        ("pyarrow", "lerobot", lambda path: to_lerobot(small_replay(), path / "x", fps=1)),
        ("Minari", "minari", lambda path: from_minari("some/dataset-v0")),
        ("Minari", "minari", lambda path: to_minari(small_replay(), "some/dataset-v0")),
    ],
)
def test_the_error_says_what_to_install(
    title: str, extra: str, call: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, title.lower(), None)
    words = rf'relive.datasets: expected {title} to be installed, got .* Run pip install "\.\[{extra}\]" in a clone'
    with pytest.raises(ImportError, match=words):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


def test_videos_and_images_have_libraries_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match="expected PyAV to be installed"):
        from_lerobot(SAMPLES / "lerobot", columns={"observation.images.wrist": None})
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match="expected Pillow to be installed"):
        from_lerobot(SAMPLES / "lerobot", columns={"observation.images.top": None})
    assert len(from_lerobot(SAMPLES / "lerobot", columns={"observation.images": None})) == 12


def test_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.json").write_text('{"data_format": "hdf5"}')
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("relive inspect: relive.datasets: expected Minari to be installed, got ")
