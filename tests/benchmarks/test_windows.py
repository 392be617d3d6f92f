"""The suite "windows": both sides are compared before they are timed, and a missing LeRobot is named."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import windows
from benchmarks.bars import bar_of
from benchmarks.suite import Refused

SMALL = windows.Case("image", episodes=3, steps=20, image=4)


class Pretended:
    """A dataset that reads windows frame by frame, as LeRobot defines them."""

    def __init__(self, case: windows.Case) -> None:
        self.case, self.frames = case, case.frames()

    def __len__(self) -> int:
        return self.case.episodes * self.case.steps

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        episode, step = divmod(number, self.case.steps)
        found: dict[str, torch.Tensor] = {}
        for name, frames in self.frames[episode].items():
            wanted = step + np.array(range(windows.CHUNK) if name == "action" else windows.HISTORY)
            read = torch.from_numpy(frames[wanted.clip(0, self.case.steps - 1)])
            key = name if name == "action" else f"observation.{name}"
            found[key] = read.movedim(-1, -3).float() / 255 if name == "image" else read
            found[f"{key}_is_pad"] = torch.from_numpy((wanted < 0) | (wanted >= self.case.steps))
        return found


def test_windows_that_agree_are_timed() -> None:
    windows.check(SMALL, windows.filled(SMALL), Pretended(SMALL))


@pytest.mark.parametrize("key", ["action", "action_is_pad", "observation.state", "observation.image"])
def test_a_window_that_differs_is_not_timed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Pretended.__getitem__

    def wrong(self: Pretended, number: int) -> dict[str, torch.Tensor]:
        found = plain(self, number)
        if number == SMALL.steps - 1:
            found[key] = ~found[key] if found[key].dtype == torch.bool else found[key] + 1
        return found

    monkeypatch.setattr(Pretended, "__getitem__", wrong)
    with pytest.raises(Refused, match=f"frame {SMALL.steps - 1}: another window of {key.removesuffix('_is_pad')}"):
        windows.check(SMALL, windows.filled(SMALL), Pretended(SMALL))


@pytest.mark.skipif(
    find_spec("lerobot") is not None, reason="says what happens without lerobot, which is installed here"
)
def test_a_missing_lerobot_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.machine.is_busy", lambda: False)
    path = tmp_path / "found.json"
    assert windows.main(["--quick", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert found["missing"] == {"LeRobotDataset": "not installed"}
    assert "not timed LeRobotDataset: not installed" in capsys.readouterr().out


def test_every_case_has_the_bar() -> None:
    for case in windows.CASES:
        bar = bar_of(case.name)
        assert bar is not None
        assert bar.times_faster == 20.0


def test_unknown_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        windows.main(["--only", "video"])
    assert "expected some of state,image" in capsys.readouterr().err
