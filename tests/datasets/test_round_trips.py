"""Files of the writers are read back bit for bit, into any buffer, in any block size."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from relive.datasets import filling, from_hdf5, to_hdf5, to_minari, to_zarr
from tests.datasets.formats import (
    DECLARED,
    FORMATS,
    assert_same,
    declarations,
    episodes,
    make_replay,
    make_rich_replay,
)  # fmt: skip
from tests.tiers import select


@pytest.mark.parametrize("examples", select(12, of=[12, 100]))
@pytest.mark.parametrize("name", FORMATS)
def test_every_buffer_comes_back(name: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(declared=declarations(name), lengths=episodes, block_bytes=st.sampled_from([1, 200, 1 << 21]))
    def write_and_read(declared: dict[str, Any], lengths: list[tuple[int, str]], block_bytes: int) -> None:
        replay = make_replay(declared, lengths)
        num_steps = len(replay)
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setenv("MINARI_DATASETS_PATH", folder)
            patch.setattr(filling, "BLOCK_BYTES", block_bytes)
            path = Path(folder) / name
            FORMATS[name].write(replay, path)
            assert_same(replay, FORMATS[name].read(path, rl.ReplayBuffer(2 * num_steps, **declared)))
            made = FORMATS[name].read(path)
        assert (len(made), made.capacity) == (num_steps, num_steps + len(lengths))
        assert_same(replay, made, narrowed=True)

    write_and_read()


@pytest.mark.parametrize("name", ["robomimic.hdf5", "minari-v0"])
def test_other_buffers_take_the_same_steps(name: str, folder: Path) -> None:
    path, replay = folder / name, make_rich_replay()
    FORMATS[name].write(replay, path)
    expected = replay[replay.ids()]
    buffer = rl.DistillationBuffer(50, DECLARED["obs"], DECLARED["action"], extra=DECLARED["extra"])
    rows = FORMATS[name].read(path, buffer)[torch.arange(len(replay))]
    for field in ("action", ("obs", "camera"), ("info", "force")):
        assert torch.equal(rows[field], expected[field])
    words = "episode 2: expected terminated or truncated at its last step, got an episode without an end"
    with pytest.raises(rl.SchemaError, match=words):
        FORMATS[name].read(path, rl.RolloutBuffer(50, None, **DECLARED))
    with pytest.raises(rl.SchemaError, match="expected a rollout with num_envs=None, got 2"):
        FORMATS[name].read(path, rl.RolloutBuffer(50, 2, **DECLARED))


@pytest.mark.parametrize("name", FORMATS)
def test_a_rollout_takes_the_final_observations(name: str, folder: Path) -> None:
    replay = make_replay({"obs": 2, "action": 1}, [(3, "truncated"), (3, "terminated")])
    FORMATS[name].write(replay, folder / name)
    rollout = FORMATS[name].read(folder / name, rl.RolloutBuffer(6, None, obs=2, action=1))
    rows = replay[replay.ids()]
    assert torch.equal(rollout["reward"], rows["reward"])
    assert rollout["terminated"].tolist() == [False] * 5 + [True]
    assert torch.equal(rollout.final_obs, rows["next_obs"][2:3])


@pytest.mark.parametrize("kind", select("disk", of=["shared", "disk", "two environments", "torch"]))
def test_every_memory_takes_the_same_steps(kind: str, tmp_path: Path) -> None:
    replay = make_rich_replay()
    to_hdf5(replay, tmp_path / "file.hdf5")
    options: dict[str, Any] = {
        "two environments": {"num_envs": 2}, "shared": {"device": rl.Memory.shared()},
        "disk": {"device": rl.Memory.disk(tmp_path / "disk")},
    }.get(kind, {})  # fmt: skip
    with rl.kernels.force("torch") if kind == "torch" else nullcontext():
        other = rl.ReplayBuffer(100, **DECLARED, **options)
        assert from_hdf5(tmp_path / "file.hdf5", other) is other
    other.check()
    expected, actual = (
        sorted((one["reward"].tolist(), one["next_obs", "pose"].tolist()) for one in each.episodes())
        for each in (replay, other)
    )
    assert actual == expected
    other.close()


@pytest.mark.parametrize("name", FORMATS)
def test_unordered_empty_and_existing_datasets_are_refused(name: str, folder: Path) -> None:
    unordered = (
        rl.ReplayBuffer(9, obs=1, action=(), next_obs="stored"), rl.RolloutBuffer(2, None, obs=1, action=()),
        rl.DistillationBuffer(9, 1),
    )  # fmt: skip
    for wrong in unordered:
        with pytest.raises(rl.SchemaError, match="to_.*: expected a replay buffer in time order"):
            FORMATS[name].write(wrong, folder / name)  # pyright: ignore[reportArgumentType]
    if FORMATS[name].write is to_zarr or name == "lerobot":
        with pytest.raises(rl.NotReadyError, match="expected at least 1 stored step, got 0"):
            FORMATS[name].write(rl.ReplayBuffer(9, obs=1, action=()), folder / name)
    assert not list(folder.iterdir())
    if name != "minari-v0":
        (folder / name).mkdir()
        with pytest.raises(FileExistsError, match="to_.*: expected a path that does not exist"):
            FORMATS[name].write(make_rich_replay(), folder / name)


@pytest.mark.parametrize(
    ("write", "declared", "words"),
    [
        (
            {"layout": "d4rl"},
            {"obs": {"a": 1, "b": 2}},
            r'to_hdf5\(layout="d4rl"\): expected one field in obs, got the fields a',
        ),
        ({"layout": "d4rl"}, {"action": {"a": 1, "b": 2}}, "expected one field in action, got the fields a, b"),
        ({"layout": "d4rl"}, {"reward": {"a": (), "b": ()}}, "expected one field in reward, got the fields a, b"),
        ({"layout": "minari"}, {}, 'layout: expected "robomimic" or "d4rl", got \'minari\''),
        ("minari", {"reward": {"a": (), "b": ()}}, "to_minari: expected one field in reward, got the fields a, b"),
        (
            "minari",
            {"extra": {"info": {"a": ()}, "a": ()}},
            "to_minari: expected infos of distinct names, got 'a' twice",
        ),
    ],
)
def test_fields_that_a_format_cannot_store_are_refused(write: Any, declared: Any, words: str, folder: Path) -> None:
    replay = make_replay({"obs": 1, "action": (), **declared}, [(1, "terminated")])
    with pytest.raises(rl.SchemaError, match=words):
        to_minari(replay, "x-v0") if write == "minari" else to_hdf5(replay, folder / "x", **write)
    assert not list(folder.iterdir())
