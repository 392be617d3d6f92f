"""LeRobot datasets (v3): images are read exactly, videos approximately, and no data is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.datasets import filling, from_lerobot, to_lerobot

pyarrow = pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')
pytest.importorskip("PIL", reason='needs Pillow: pip install ".[lerobot]"')

SAMPLE = Path(__file__).parent / "samples" / "lerobot"
NO_VIDEO = {"observation.images.top": None}


def test_a_dataset_of_lerobot_is_read() -> None:
    replay = from_lerobot(SAMPLE, columns=NO_VIDEO, seed=0)
    assert (len(replay), replay.capacity) == (12, 12 + 3)
    first, second, third = replay.episodes()
    assert second["obs", "state"].tolist() == [[10, -10], [11, -11], [12, -12]]
    assert second["next_obs", "state"].tolist() == [[11, -11], [12, -12], [12, -12]]
    assert second["obs", "pose"][1].tolist() == [[11] * 3] * 2
    assert second["action"].tolist() == [[10.5, 1], [11.5, 1], [12.5, 1]]
    assert second["reward"].tolist() == [10, 11, 12]
    assert (second["terminated"].tolist(), second["truncated"].tolist()) == ([False] * 3, [False, False, True])
    assert (third["terminated"].tolist(), third["truncated"].tolist()) == ([False] * 4 + [True], [False] * 5)
    assert [one["task_index"].tolist() for one in (first, second, third)] == [[0] * 4, [0] * 3, [1] * 5]
    wrist = torch.full((5, 8, 10, 3), 20, dtype=torch.uint8) + torch.arange(5).view(5, 1, 1, 1).to(torch.uint8)
    wrist[range(5), range(5), range(5), 0] = 255
    assert torch.equal(third["obs", "images", "wrist"], wrist)
    counted = ("index", "frame_index", "episode_index", "timestamp")
    assert not set(counted) & set(replay.columns.keys())


def test_video_frames_are_close_to_the_recorded_images(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av", reason='needs PyAV: pip install ".[lerobot]"')
    # The video is read in one block, and row by row.
    for size in (1 << 24, 1):
        monkeypatch.setattr(filling, "BLOCK_BYTES", size)
        replay = from_lerobot(SAMPLE)
        for number, one in enumerate(replay.episodes()):
            recorded = 8 * (10 * number + torch.arange(len(one)))
            frames = one["obs", "images", "top"]
            assert frames.dtype == torch.uint8
            assert (frames.int() - recorded.view(-1, 1, 1, 1)).abs().max() <= 4
            assert frames.shape[1:] == (64, 64, 3)


def test_counter_columns_are_read_if_columns_names_them() -> None:
    replay = from_lerobot(SAMPLE, columns={**NO_VIDEO, "timestamp": "timestamp", "frame_index": "frame"})
    second = list(replay.episodes())[1]
    assert second["frame"].tolist() == [0, 1, 2]
    assert second["timestamp"].tolist() == pytest.approx([0, 0.1, 0.2])
    declared: dict[str, Any] = {"obs": {"state": 2}, "action": 2, "extra": {"episode_index": rl.Field((), torch.int64)}}
    buffer = rl.ReplayBuffer(20, **declared)
    left_out: dict[str, str | None] = dict.fromkeys(("observation.images", "observation.pose", "task_index"))
    from_lerobot(SAMPLE, buffer, columns=left_out)
    assert [one["episode_index"][0].item() for one in buffer.episodes()] == [0, 1, 2]


def test_encode_converts_the_text_of_a_task() -> None:
    encoded_texts: list[str] = []

    def embed(text: str) -> np.ndarray:
        encoded_texts.append(text)
        return np.array([len(text), 1.0])

    replay = from_lerobot(SAMPLE, columns=NO_VIDEO, encode={"task": embed})
    assert [one["task"][0].tolist() for one in replay.episodes()] == [[4, 1], [4, 1], [15, 1]]
    assert encoded_texts == ["push", "pull the handle"]
    with pytest.raises(rl.SchemaError, match="lerobot: task: expected numbers, got texts. Pass encode="):
        from_lerobot(SAMPLE, columns={"task": "task"})


def test_a_buffer_without_task_index_must_leave_it_out() -> None:
    buffer = rl.ReplayBuffer(20, obs={"state": 2}, action=2)
    left_out: dict[str, str | None] = dict.fromkeys(("observation.images", "observation.pose"))
    with pytest.raises(
        rl.SchemaError, match="lerobot: task_index: expected a field 'task_index' of the buffer, got none"
    ):
        from_lerobot(SAMPLE, buffer, columns=left_out)
    assert len(from_lerobot(SAMPLE, buffer, columns={**left_out, "task_index": None})) == 12


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason='needs pyarrow: pip install ".[lerobot]"')
    shutil.copytree(SAMPLE, tmp_path / "set")
    file = tmp_path / "set/data/chunk-000/file-000.parquet"
    table = parquet.read_table(file)
    for number, rows in enumerate((slice(0, 2), slice(2, 9), slice(9, 12))):
        part = table.slice(rows.start, rows.stop - rows.start)
        parquet.write_table(part, file.with_name(f"file-{number:03d}.parquet"), row_group_size=2)
    whole, split = (from_lerobot(path, columns=NO_VIDEO) for path in (SAMPLE, tmp_path / "set"))
    assert bool((whole[whole.ids()] == split[split.ids()]).all())


def test_tasks_are_written_by_their_numbers(tmp_path: Path) -> None:
    replay = from_lerobot(SAMPLE, columns=NO_VIDEO)
    to_lerobot(replay, tmp_path / "set", fps=10, tasks=["push", "pull it"])
    again = from_lerobot(tmp_path / "set", encode={"task": len})
    assert again[again.ids()]["task"].tolist() == [4] * 7 + [7] * 5
    assert bool((replay[replay.ids()]["task_index"] == again[again.ids()]["task_index"]).all())
    with pytest.raises(rl.SchemaError, match=r"to_lerobot: tasks: expected a text for \[1\], got 1 texts"):
        to_lerobot(replay, tmp_path / "other", fps=10, tasks="push")
    assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("fps", [0, -1, float("nan"), float("inf"), 1e7, "10", True, None], "fps: expected a number above 0"),
        ("tasks", [3, [3], None, ["pick", None]], "tasks: expected a text, or a list of texts"),
    ],
)
def test_rates_and_tasks_that_from_lerobot_cannot_read_are_refused(
    name: str, values: list[Any], words: str, tmp_path: Path
) -> None:
    replay = from_lerobot(SAMPLE, columns=NO_VIDEO)
    for wrong in values:
        with pytest.raises(rl.SchemaError, match=words):
            to_lerobot(replay, tmp_path / "set", **{"fps": 10, name: wrong})
    assert not list(tmp_path.iterdir())


def test_names_that_lerobot_uses_itself_are_refused(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(9, obs=1, action=1, extra={"timestamp": ()})
    replay.add([0], [0], 0.0, True, False, next_obs=[1], timestamp=0.5)
    with pytest.raises(rl.SchemaError, match="to_lerobot: expected names that LeRobot can have, got 'timestamp'"):
        to_lerobot(replay, tmp_path / "set", fps=10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codebase_version": "v2.1"}, "expected codebase_version v3, got 'v2.1'. Convert it with lerobot's"),
        ({"features": 3}, "expected features with 'episode_index', got 3"),
        ({"fps": 0}, "expected fps, a positive number, got 0"),
    ],
)
def test_other_versions_and_invalid_descriptions_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shutil.copytree(SAMPLE, tmp_path / "set")
    info = tmp_path / "set/meta/info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | change))
    with pytest.raises(rl.SchemaError, match=f"set: meta/info.json: {words}"):
        from_lerobot(tmp_path / "set")


def test_the_lerobot_library_reads_a_written_dataset(tmp_path: Path) -> None:
    """Needs lerobot, which needs an older torch than the other tests."""
    lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="needs lerobot, which needs torch < 2.11")
    replay = from_lerobot(SAMPLE, columns=NO_VIDEO)
    to_lerobot(replay, tmp_path / "set", fps=10, tasks=["push", "pull the handle"])
    dataset = lerobot.LeRobotDataset("someone/counting", root=tmp_path / "set")
    rows = replay[replay.ids()]
    for number in range(12):
        frame = dataset[number]
        assert torch.equal(frame["action"], rows["action"][number])
        pixels = (frame["observation.images.wrist"] * 255).round().to(torch.uint8).permute(1, 2, 0)
        assert torch.equal(pixels, rows["obs", "images", "wrist"][number])
        assert frame["task"] == ("push" if number < 7 else "pull the handle")
