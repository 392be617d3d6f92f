"""Regression tests of reported defects in the readers and writers of datasets."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive import datasets

h5py = pytest.importorskip("h5py", reason='needs HDF5: pip install ".[hdf5]"')
pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')
pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')


def written(folder: Path, **settings: Any) -> dict[str, Any]:
    """Write eight steps in each format; return a function per format that reads them."""
    replay = rl.ReplayBuffer(16, 2, 2, seed=0, **settings)
    for t in range(8):
        obs, following = np.full(2, t, np.float32), np.full(2, t + 1, np.float32)
        reward = np.full(settings.get("reward", ()), t, np.float32)
        replay.add(obs, obs, reward, terminated=False, truncated=t % 4 == 3, next_obs=following)
    datasets.to_hdf5(replay, folder / "robomimic.hdf5")
    datasets.to_hdf5(replay, folder / "d4rl.hdf5", layout="d4rl")
    datasets.to_zarr(replay, folder / "steps.zarr")
    datasets.to_lerobot(replay, folder / "lerobot", fps=10)
    return {
        "actions": partial(datasets.from_hdf5, folder / "robomimic.hdf5"),
        "observations": partial(datasets.from_hdf5, folder / "d4rl.hdf5"),
        "action": partial(datasets.from_zarr, folder / "steps.zarr"),
        "next.reward": partial(datasets.from_lerobot, folder / "lerobot", columns={"task_index": None}),
    }


def test_readers_explain_columns_that_no_file_can_have(tmp_path: Path) -> None:
    for column, read in written(tmp_path).items():
        for wrong in (
            3,
            0,
            "obs",
            [column],
            [(column, "obs")],
            {column: 3},
            {column: ("obs",)},
            {column: b"x"},
            {1: "x"},
        ):
            with pytest.raises(rl.SchemaError, match=r"^columns: expected .*, got .*\. Pass "):
                read(columns=wrong)


def test_readers_explain_encoders_that_are_no_functions(tmp_path: Path) -> None:
    reads = written(tmp_path)
    for read in (reads["actions"], reads["observations"], reads["next.reward"]):
        for wrong in (3, 0, "task", ["task"], {"task": 3}, {"task": None}, {1: len}):
            with pytest.raises(rl.SchemaError, match=r"^encode: expected .*, got .*\. Pass "):
                read(encode=wrong)
    with pytest.raises(rl.SchemaError, match="task: expected numbers of one shape from encode=, got "):
        reads["next.reward"](encode={"task": lambda text: [[1], [1, 2]]})


@pytest.mark.parametrize("reward", [(), (1,), (2,)])
def test_rewards_come_back_in_the_shape_that_they_were_written_in(reward: tuple[int, ...], tmp_path: Path) -> None:
    for read in written(tmp_path, reward=reward).values():
        made, given = read(), read(rl.ReplayBuffer(16, 2, 2, reward=reward), final_obs="repeat")
        for replay in (made, given):
            rewards = [episode["reward"] for episode in replay.episodes()]
            assert [each.shape for each in rewards] == [(4, *reward)] * 2
            assert torch.cat(rewards).reshape(8, -1)[:, 0].tolist() == list(range(8))


def test_rewards_with_an_axis_that_other_libraries_write_are_numbers_unless_the_buffer_says_otherwise(
    tmp_path: Path,
) -> None:
    reads = written(tmp_path)
    for name, group in (("robomimic", "data/demo_{}/"), ("d4rl", "")):
        with h5py.File(tmp_path / f"{name}.hdf5", "r+") as file:
            for column in {group.format(i) + "rewards" for i in range(2)}:
                values = file[column][:][:, None]
                del file[column]
                file[column] = values
    for read in (reads["actions"], reads["observations"]):
        assert next(read().episodes())["reward"].tolist() == [0.0, 1.0, 2.0, 3.0]
        vectors = read(rl.ReplayBuffer(16, 2, 2, reward=(1,)), final_obs="repeat")
        assert next(vectors.episodes())["reward"].tolist() == [[0.0], [1.0], [2.0], [3.0]]


@pytest.mark.parametrize("final_obs", ["drop", None])
def test_steps_that_are_left_out_take_no_room_in_a_rollout(final_obs: Any, tmp_path: Path) -> None:
    read = written(tmp_path)["observations"]
    with h5py.File(tmp_path / "d4rl.hdf5", "r+") as file:
        # Without this array, the last steps of both episodes have no next observation.
        del file["next_observations"]
    full = rl.RolloutBuffer(6, None, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rl.DataWarning)
        assert read(full, final_obs=final_obs).is_full
    small = rl.RolloutBuffer(5, None, 2, 2)
    with pytest.raises(rl.BufferFullError, match="expected room for 6 steps, got room for 5. 1 step did not fit"):
        read(small, final_obs=final_obs)
    with pytest.raises(rl.BufferFullError, match="expected room for 8 steps, got room for 5. 3 steps did not fit"):
        read(small, final_obs="repeat")
    assert not small.num_stored


@pytest.mark.parametrize("name", ["action", "reward"])
def test_hdf5_keeps_the_parts_of_a_field_or_refuses_them(name: str, tmp_path: Path) -> None:
    fields = {"obs": 1, "action": 2, "reward": (), name: {"one": (), "two": ()}}
    replay = rl.ReplayBuffer(16, **fields, seed=0)
    for t in range(8):
        step = {"obs": [t], "action": [t, t], "reward": t, name: {"one": t, "two": -t}}
        replay.add(**step, terminated=t % 4 == 3, truncated=False, next_obs=[t + 1])
    with pytest.raises(rl.SchemaError, match=f"one field in {name}, got the fields one, two"):
        datasets.to_hdf5(replay, tmp_path / "d4rl.hdf5", layout="d4rl")
    assert not any(tmp_path.iterdir())
    datasets.to_hdf5(replay, tmp_path / "robomimic.hdf5")
    with h5py.File(tmp_path / "robomimic.hdf5") as file:
        assert [demo.attrs["num_samples"] for demo in file["data"].values()] == [4, 4]
    again = datasets.from_hdf5(tmp_path / "robomimic.hdf5")
    torch.testing.assert_close(again[again.ids()][name].to_dict(), replay[replay.ids()][name].to_dict())


@pytest.mark.parametrize(
    "encode",
    [lambda text: np.longdouble(1), lambda text: torch.zeros(3, requires_grad=True)],
    ids=["float128", "a tensor with a gradient"],
)
def test_encode_with_numbers_that_no_field_can_store_is_a_schema_error(tmp_path: Path, encode: Any) -> None:
    read = written(tmp_path)["next.reward"]
    with pytest.raises(rl.SchemaError, match=r"lerobot: task: expected numbers .* from encode="):
        read(encode={"task": encode})


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), 1e7, "10", True, None])
def test_to_lerobot_refuses_a_rate_that_from_lerobot_cannot_read(tmp_path: Path, fps: Any) -> None:
    replay = rl.ReplayBuffer(4, 1, 1)
    replay.add([0], [0], 0, True, False, [1])
    with pytest.raises(rl.SchemaError, match="fps: expected a number above 0"):
        datasets.to_lerobot(replay, tmp_path / "dataset", fps=fps)


@pytest.mark.parametrize("tasks", [3, [3], None, ["pick", None]])
def test_to_lerobot_refuses_tasks_that_are_not_texts(tmp_path: Path, tasks: Any) -> None:
    replay = rl.ReplayBuffer(4, 1, 1)
    replay.add([0], [0], 0, True, False, [1])
    with pytest.raises(rl.SchemaError, match="tasks: expected a text, or a list of texts"):
        datasets.to_lerobot(replay, tmp_path / "dataset", fps=10, tasks=tasks)


@pytest.mark.parametrize("file", ["actions", "observations"])
def test_from_hdf5_checks_time_limit_in_every_layout(tmp_path: Path, file: str) -> None:
    with pytest.raises(rl.SchemaError, match="time_limit: expected a positive int"):
        written(tmp_path)[file](time_limit=2.5)
