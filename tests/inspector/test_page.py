"""The page as a file: its contents and size, and that names are never markup."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.inspector.page import encode_png, is_picture, make_frame
from relive.schema import fields
from relive.statistics import observers

HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1>{{script}}&\u2028"


def read_page_data(page: Path) -> dict[str, Any]:
    """Return the data of the page, parsed from its JSON."""
    actual = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.S)
    assert actual is not None
    return json.loads(actual[1])


def read_series(data: dict[str, Any], episode: int) -> dict[str, list[float]]:
    browser = data["browser"]
    decoded = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in browser["episodes"][episode]["series"]]
    return dict(zip(browser["series"], decoded, strict=True))


def walk(lengths: list[int], **options: Any) -> rl.ReplayBuffer:
    """Return a buffer of episodes with the observation (episode, step) and the step as reward."""
    replay = rl.ReplayBuffer(2 * sum(lengths) + len(lengths), obs=2, action=(), seed=0, **options)
    for episode, length in enumerate(lengths):
        for t in range(length):
            last = t == length - 1
            replay.add([episode, t], 0.5 * t, t, last and episode % 2 == 0, last and episode % 2 == 1, [episode, t + 1])
    return replay


def test_the_page_has_the_report_and_every_step_of_its_episodes(tmp_path: Path) -> None:
    report = rl.inspect(walk([3, 5]), html=tmp_path / "deep" / "page.html")
    data = read_page_data(tmp_path / "deep" / "page.html")
    assert {name: data[name] for name in report.as_dict()} == report.as_dict()
    newest, oldest = data["browser"]["episodes"]
    contents = ("number", "length", "end", "return", "first", "began", "env")
    assert [newest[name] for name in contents] == [1, 5, "truncated", 10, 0, True, 0]
    assert [oldest[name] for name in contents] == [0, 3, "terminated", 3, 0, True, 0]
    assert read_series(data, 0) == {
        "reward": [0, 1, 2, 3, 4],
        "action": [0, 0.5, 1, 1.5, 2],
        "obs[0]": [1, 1, 1, 1, 1],
        "obs[1]": [0, 1, 2, 3, 4],
    }


def test_values_and_advantages_have_timelines_of_their_own(tmp_path: Path) -> None:
    rollout = rl.RolloutBuffer(3, None, obs=20, action=())
    for t in range(3):
        rollout.add(np.full(20, t), 0.0, 1.0, t == 2, False, value=float(t))
    rollout.compute_advantage(0.0, gamma=1.0, lam=1.0)
    rl.inspect(rollout, html=tmp_path / "page.html")
    data = read_page_data(tmp_path / "page.html")
    assert data["browser"]["series"][:4] == ["reward", "value", "advantage", "return"]
    assert read_series(data, 0)["advantage"] == [3, 1, -1]
    # Of 25 series (reward, value, advantage, return, action and 20 observations) the page plots 16.
    assert (len(data["browser"]["series"]), data["browser"]["left_out"]) == (16, 9)


@pytest.mark.thorough
def test_a_large_buffer_makes_a_small_page_that_says_what_is_missing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [int(length) for length in rng.integers(1, 400, 300)]
    lengths[7] = 5000
    rl.inspect(walk(lengths), html=tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_000_000
    browser = read_page_data(tmp_path / "page.html")["browser"]
    assert browser["of"] == 300
    assert [episode["number"] for episode in browser["episodes"][:12]] == list(range(299, 287, -1)), "the newest"
    assert browser["episodes"][12]["number"] == 7, "then the best"
    assert sum(episode["length"] - episode["first"] for episode in browser["episodes"]) <= 12_000
    longest = next(episode for episode in browser["episodes"] if episode["number"] == 7)
    assert (longest["length"], longest["first"]) == (5000, 4000), "of a long one its last steps"


def test_names_and_reasons_are_data_and_never_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both modules would refuse the name.
    for module in (fields, observers):
        monkeypatch.setattr(module, "NAME_PATTERN", re.compile(".*"))
    stats = rl.EpisodeStats(None, reasons=(HOSTILE,))
    replay = rl.ReplayBuffer(9, obs={HOSTILE: 1}, action=(), stats=stats)
    replay.add({HOSTILE: [1.0]}, 0.0, 0.0, True, False, next_obs={HOSTILE: [2.0]})
    rl.inspect(replay, html=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text
    data = read_page_data(tmp_path / "page.html")
    assert data["fields"][0]["name"] == f"obs.{HOSTILE}"
    assert data["episodes"]["stats"]["reasons"] == {HOSTILE: 0}


def test_the_page_loads_nothing_and_only_its_own_script_may_run(tmp_path: Path) -> None:
    rl.inspect(walk([3]), html=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert re.findall(r'(?:src|href)="(?!#|data:)', text) == []
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((84, 84), "uint8", True),
        ((3, 32, 32), "uint8", True),
        ((84, 84, 3, 4), "uint8", True),
        ((84, 84), "float32", False),
        ((84,), "uint8", False),
        ((4, 4), "uint8", False),
        ((100, 3), "uint8", False),
    ],
)
def test_pictures_are_bytes_with_height_and_width(shape: tuple[int, ...], dtype: str, expected: bool) -> None:
    assert is_picture(shape, dtype) is expected


def test_the_frame_of_a_row_is_found_in_every_layout() -> None:
    picture = np.arange(20 * 30, dtype=np.uint8).reshape(20, 30)
    colour = np.stack([picture, picture // 2, picture // 3], -1)
    others = np.zeros_like(picture)
    assert np.array_equal(make_frame(picture), picture)
    assert np.array_equal(make_frame(colour), colour)
    assert np.array_equal(make_frame(np.moveaxis(colour, -1, 0)), colour)
    assert np.array_equal(make_frame(picture[..., None]), picture)
    assert np.array_equal(make_frame(np.stack([others, others, others, picture], -1)), picture), "of a stack the newest"
    assert np.array_equal(make_frame(np.stack([others, others, others, picture])), picture)
    assert np.array_equal(make_frame(np.stack([colour * 0, colour], -1)), colour)


def test_large_frames_are_averaged_down() -> None:
    picture = np.zeros((210, 160), np.uint8)
    picture[:3, :3] = 90
    picture[3:6, :3] = np.arange(9, dtype=np.uint8).reshape(3, 3)
    small = make_frame(picture)
    assert small.shape == (70, 53)
    assert (small[0, 0], small[1, 0], small[2, 0]) == (90, 4, 0)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_a_png_holds_the_picture(shape: tuple[int, ...]) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with image.open(BytesIO(encode_png(picture)), formats=["PNG"]) as decoded:
        assert decoded.mode == ("RGB" if len(shape) == 3 else "L")
        assert np.array_equal(np.asarray(decoded), picture)


def test_frames_are_spread_over_the_episode(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(200, obs=rl.Field((12, 10), torch.uint8), action=())
    for t in range(100):
        step = (np.full((12, 10), i, np.uint8) for i in (t, t + 1))
        replay.add(next(step), 0.0, 0.0, t == 99, False, next(step))
    rl.inspect(replay, html=tmp_path / "page.html")
    (strip,) = read_page_data(tmp_path / "page.html")["browser"]["episodes"][0]["frames"]
    assert (strip["name"], strip["width"], strip["height"], len(strip["at"])) == ("obs", 10, 12, 16)
    assert (strip["at"][0], strip["at"][-1]) == (0, 99)
    assert strip["png"].startswith("data:image/png;base64,")
