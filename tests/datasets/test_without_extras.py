"""Without the library of a format, an error says how to install it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.datasets import from_hdf5, from_lerobot, from_zarr, to_hdf5, to_lerobot, to_zarr

SAMPLES = Path(__file__).parent / "samples"


def small() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(9, obs=1, action=1)
    replay.add([0], [0], 0.0, True, False, next_obs=[1])
    return replay


@pytest.mark.parametrize(
    ("modules", "extra", "title", "call"),
    [
        (("h5py",), "hdf5", "h5py", lambda path: from_hdf5(SAMPLES / "d4rl.hdf5")),
        (("h5py",), "hdf5", "h5py", lambda path: to_hdf5(small(), path / "x")),
        (("numcodecs",), "zarr", "numcodecs", lambda path: from_zarr(SAMPLES / "diffusion_policy.zarr")),
        (("numcodecs",), "zarr", "numcodecs", lambda path: to_zarr(small(), path / "x")),
        (("pyarrow",), "lerobot", "pyarrow", lambda path: from_lerobot(SAMPLES / "lerobot")),
        (("pyarrow",), "lerobot", "pyarrow", lambda path: to_lerobot(small(), path / "x", fps=1)),
    ],
)
def test_the_error_says_what_to_install(
    modules: tuple[str, ...], extra: str, title: str, call: Callable[[Path], Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
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
