"""Files of `to_hdf5`, `to_zarr` and `to_lerobot` are read back bit for bit, into any buffer, in any block size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.datasets import filling, from_hdf5, from_lerobot, from_zarr, to_hdf5, to_lerobot, to_zarr
from tests.datasets.rich import DECLARED, assert_same, leaves, make_rich_replay
from tests.tiers import select

pytest.importorskip("h5py", reason='needs HDF5: pip install ".[hdf5]"')
pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')
pytest.importorskip("pyarrow", reason='needs pyarrow: pip install ".[lerobot]"')

FORMATS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "robomimic.hdf5": (to_hdf5, from_hdf5),
    "folder.zarr": (to_zarr, from_zarr),
    "zipped.zarr.zip": (to_zarr, from_zarr),
    "lerobot": (lambda replay, path: to_lerobot(replay, path, fps=10), from_lerobot),
}
NO_TASK = {"lerobot": {"columns": {"task_index": None}}}
"""The buffers of these tests have no tasks."""


@pytest.fixture(params=select("robomimic.hdf5", "folder.zarr", "lerobot", of=FORMATS))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., tuple[rl.ReplayBuffer, Any]]:
    """Write a buffer in a format; return the buffer and a function that reads it back."""
    write, read = FORMATS[request.param]
    path = tmp_path / request.param

    def make(replay: rl.ReplayBuffer) -> tuple[rl.ReplayBuffer, Any]:
        write(replay, path)
        return replay, lambda *a, **k: read(path, *a, **NO_TASK.get(request.param, {}), **k)

    return make


def test_every_transition_comes_back(written: Any) -> None:
    replay, read = written(make_rich_replay())
    assert_same(replay, read(rl.ReplayBuffer(100, **DECLARED)))


def test_a_new_buffer_has_space_for_all_and_float32(written: Any) -> None:
    replay, read = written(make_rich_replay())
    made = read(seed=3)
    assert (len(made), made.capacity) == (13, 13 + 4)
    for mine, theirs in zip(replay.episodes(), made.episodes(), strict=True):
        for key, leaf in leaves(mine).items():
            actual = theirs.get(key)
            expected = leaf.float() if leaf.dtype == torch.float64 else leaf
            assert actual.dtype == expected.dtype
            assert torch.equal(expected, actual)


def test_blocks_of_any_size_give_the_same(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, read = written(make_rich_replay())
    for size in (1, 5_000, 7_000, 20_000):
        monkeypatch.setattr(filling, "BLOCK_BYTES", size)
        assert_same(replay, read(rl.ReplayBuffer(100, **DECLARED)))


@pytest.mark.parametrize("kind", select("disk", of=["shared", "disk", "two environments", "torch"]))
def test_every_memory_takes_the_same_steps(written: Any, kind: str, tmp_path: Path) -> None:
    replay, read = written(make_rich_replay())
    options: dict[str, Any] = {"two environments": {"num_envs": 2}, "shared": {"device": rl.Memory.shared()}}.get(
        kind, {}
    )
    if kind == "disk":
        options = {"device": rl.Memory.disk(tmp_path / "disk")}
    with rl.kernels.force("torch") if kind == "torch" else nullcontext():
        other = rl.ReplayBuffer(100, **DECLARED, **options)
        assert read(other) is other
    other.check()
    expected, actual = (
        sorted(
            list(zip(one["reward"].tolist(), one["next_obs", "pose"].tolist(), strict=True)) for one in each.episodes()
        )
        for each in (replay, other)
    )
    assert actual == expected
    other.close()


def test_a_distillation_buffer_takes_every_observation_and_action(written: Any) -> None:
    replay, read = written(make_rich_replay())
    buffer = rl.DistillationBuffer(50, DECLARED["obs"], DECLARED["action"], extra=DECLARED["extra"])
    read(buffer)
    rows = buffer[torch.arange(13)]
    expected = replay[replay.ids()]
    assert torch.equal(rows["action"], expected["action"])
    assert torch.equal(rows["obs", "camera"], expected["obs", "camera"])
    assert torch.equal(rows["info", "force"], expected["info", "force"])


def test_a_rollout_needs_episodes_that_end(written: Any) -> None:
    _, read = written(make_rich_replay())
    declared = {name: DECLARED[name] for name in ("obs", "action", "reward", "extra")}
    with pytest.raises(rl.SchemaError, match="episode 2: expected terminated or truncated at its last step"):
        read(rl.RolloutBuffer(50, None, **declared))


def test_a_rollout_takes_the_final_observations(written: Any) -> None:
    replay = rl.ReplayBuffer(20, obs=2, action=1)
    for t in range(6):
        replay.add([t, -t], [t], float(t), t == 5, t == 2, next_obs=[t + 1, -t - 1])
    _, read = written(replay)
    rollout = rl.RolloutBuffer(6, None, obs=2, action=1)
    read(rollout)
    assert rollout["reward"].tolist() == [0, 1, 2, 3, 4, 5]
    assert rollout["terminated"].tolist() == [False] * 5 + [True]
    assert rollout.final_obs.tolist() == [[3, -3]]


def test_an_observation_without_parts_stays_whole(written: Any) -> None:
    replay = rl.ReplayBuffer(20, obs=rl.Field(2, torch.bfloat16), action=rl.Field((), torch.int16))
    for t in range(4):
        replay.add([t, 0.1 * t], t, float(t), False, False, next_obs=[t + 1, 0.1 * (t + 1)])
    _, read = written(replay)
    assert_same(replay, read(rl.ReplayBuffer(20, obs=rl.Field(2, torch.bfloat16), action=rl.Field((), torch.int16))))


def test_a_nested_action_and_several_rewards_come_back(written: Any) -> None:
    declared: dict[str, Any] = {
        "obs": {"deep": {"er": 1}, "action": ()}, "action": {"arm": 2, "grip": rl.Field((), torch.bool)},
        "reward": {"fox": (), "hare": ()}, "extra": {"frame": rl.Field((4, 6, 3), torch.uint8)},
    }  # fmt: skip
    rng = np.random.default_rng(0)
    replay = rl.ReplayBuffer(20, **declared)
    for t in range(5):
        obs, after = ({"deep": {"er": [at]}, "action": float(at)} for at in (t, t + 1))
        action = {"arm": rng.normal(size=2).astype(np.float32), "grip": bool(t % 2)}
        frame = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
        replay.add(obs, action, {"fox": t, "hare": -t}, t == 4, False, next_obs=after, frame=frame)
    _, read = written(replay)
    assert_same(replay, read(rl.ReplayBuffer(20, **declared)))


@pytest.mark.parametrize("layout", ["robomimic", "d4rl"])
def test_both_layouts_of_hdf5_keep_cuts_and_extra_fields(layout: Any, tmp_path: Path) -> None:
    declared: dict[str, Any] = {"obs": 2, "action": 1, "extra": {"note": 3, "deep": {"er": rl.Field((), torch.int64)}}}
    replay = rl.ReplayBuffer(40, **declared)
    for t in range(12):
        ends = t == 3, t == 7
        note = {"note": [t, t, t], "deep": {"er": t}}
        replay.add([t, 0], [t], t / 3, *ends, next_obs=[t + 1, 0], **note)
        if t in (5, 9):
            replay.cut()
    to_hdf5(replay, tmp_path / "file.hdf5", layout=layout)
    assert_same(replay, from_hdf5(tmp_path / "file.hdf5", rl.ReplayBuffer(40, **declared)))
    made = from_hdf5(tmp_path / "file.hdf5")
    assert (len(made), made.capacity) == (12, 12 + 5)


def test_unordered_and_empty_buffers_are_refused(tmp_path: Path) -> None:
    stored = rl.ReplayBuffer(9, obs=1, action=(), next_obs="stored")
    for write, name in ((to_hdf5, "to_hdf5"), (to_zarr, "to_zarr"), (FORMATS["lerobot"][0], "to_lerobot")):
        with pytest.raises(rl.SchemaError, match=f"{name}: expected a replay buffer in time order"):
            write(stored, tmp_path / "x")
        (tmp_path / name).mkdir()
        with pytest.raises(FileExistsError, match=f"{name}: expected a path that does not exist"):
            write(make_rich_replay(), tmp_path / name)
    for write in (to_zarr, FORMATS["lerobot"][0]):
        with pytest.raises(rl.NotReadyError, match="expected at least 1 stored step, got 0"):
            write(rl.ReplayBuffer(9, obs=1, action=()), tmp_path / "x")
    with pytest.raises(rl.SchemaError, match="expected one field in obs, got the fields camera, pose, pair"):
        to_hdf5(make_rich_replay(), tmp_path / "x", layout="d4rl")
    with pytest.raises(rl.SchemaError, match='layout: expected "robomimic" or "d4rl", got \'minari\''):
        to_hdf5(make_rich_replay(), tmp_path / "x", layout="minari")  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob("*.unfinished"))
