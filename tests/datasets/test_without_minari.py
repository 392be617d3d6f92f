"""Without Minari, an error says how to install it."""

import sys
from pathlib import Path

import pytest

import relive as rl
from relive.cli import main
from relive.datasets import from_minari, to_minari


@pytest.fixture(autouse=True)
def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)


def test_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r'Run pip install "\.\[minari\]" in a clone of relive'):
        from_minari("some/dataset-v0")
    with pytest.raises(ImportError, match="relive.datasets: expected Minari to be installed, got "):
        to_minari(rl.ReplayBuffer(9, obs=1, action=()), "some/dataset-v0")


def test_so_does_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.json").write_text('{"data_format": "hdf5"}')
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("relive inspect: relive.datasets: expected Minari to be installed, got ")
