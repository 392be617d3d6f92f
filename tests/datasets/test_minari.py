"""Minari datasets: episodes are read back as they were written, bit for bit."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import relive as rl
from relive.checkpoint import progress
from relive.cli import main
from relive.datasets import from_minari, to_minari
from tests.datasets.formats import DECLARED, assert_same, make_replay, make_rich_replay

minari = pytest.importorskip("minari", reason='needs Minari: pip install ".[minari]"')
pytest.importorskip("h5py", reason='needs the files of Minari: pip install ".[minari]"')


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_a_round_trip_keeps_every_transition(data_format: str) -> None:
    if data_format != "hdf5":
        pytest.importorskip("pyarrow", reason="needs pyarrow")
    replay = make_rich_replay()
    dataset = to_minari(replay, "test/rich-v0", data_format=data_format)
    assert (dataset.total_episodes, dataset.total_steps) == (4, 13)
    for source in (dataset, "test/rich-v0", dataset.storage.data_path):
        assert_same(replay, from_minari(source, rl.ReplayBuffer(100, **DECLARED)))


def test_an_extra_field_info_without_parts_is_an_info() -> None:
    declared = {"obs": 1, "action": (), "extra": {"info": 2, "note": ()}}
    replay = make_replay(declared, [(2, "terminated")])
    assert_same(replay, from_minari(to_minari(replay, "test/info-v0"), rl.ReplayBuffer(9, **declared)))


def test_other_objects_are_refused() -> None:
    with pytest.raises(rl.SchemaError, match="dataset: expected a Minari dataset, got int"):
        from_minari(3)
    with pytest.raises(rl.SchemaError, match="from_minari: expected a buffer, got dict"):
        from_minari(make_collected(), {})


def test_the_minari_library_reads_a_written_dataset() -> None:
    replay = make_rich_replay()
    first = next(replay.episodes())
    episode = to_minari(replay, "test/rich-v0")[0]
    assert len(episode.observations["pose"]) == 4
    assert np.array_equal(episode.observations["pose"][:3], first["obs", "pose"].numpy())
    assert np.array_equal(episode.observations["pose"][3], first["next_obs", "pose"][-1].numpy())
    assert episode.terminations.tolist() == [False, False, True]
    assert np.array_equal(episode.infos["force"][1:], first["info", "force"].numpy())
    assert not episode.infos["force"][0].any(), "no reset has told anything"


def test_tuple_observations_are_written_as_tuples() -> None:
    spaces = gym.spaces.Tuple((gym.spaces.Box(-9, 9, (2,)), gym.spaces.Discrete(5)))
    replay = rl.ReplayBuffer(10, obs=spaces, action=gym.spaces.Discrete(3))
    replay.add((np.ones(2, np.float32), 1), 2, 1.0, True, False, next_obs=(np.zeros(2, np.float32), 0))
    given = {"observation_space": spaces, "action_space": gym.spaces.Discrete(3)}
    dataset = to_minari(replay, "test/tuple-v0", **given)
    assert dataset.observation_space == spaces
    assert isinstance(dataset[0].observations, tuple)
    again = from_minari(dataset)
    assert bool((next(replay.episodes())["obs"] == next(again.episodes())["obs"]).all())


def make_collected() -> Any:
    """Make a dataset as Minari does: with float64, and with infos of the reset."""
    episodes = []
    for number, length in enumerate((2, 3)):
        at = 10.0 * number + np.arange(length + 1)
        episodes.append(
            minari.data_collector.EpisodeBuffer(
                observations={"x": np.stack([at, -at], 1)},
                actions=at[:-1, None].astype(np.float32),
                rewards=list(at[:-1]),
                terminations=[False] * (length - 1) + [number == 0],
                truncations=[False] * (length - 1) + [number == 1],
                infos={"level": at + 0.5, "deep": {"er": np.stack([at, at], 1)}},
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minari.create_dataset_from_buffers(
            "test/collected-v0",
            episodes,
            observation_space=gym.spaces.Dict({"x": gym.spaces.Box(-99, 99, (2,), np.float64)}),
            action_space=gym.spaces.Box(-99, 99, (1,)),
        )


def test_infos_belong_to_their_steps() -> None:
    replay = from_minari(make_collected())
    first, second = replay.episodes()
    assert first["obs", "x"].dtype == first["reward"].dtype == first["info", "level"].dtype == torch.float32
    assert second["obs", "x"][:, 0].tolist() == [10, 11, 12]
    assert second["next_obs", "x"][:, 0].tolist() == [11, 12, 13]
    assert second["info", "level"].tolist() == [11.5, 12.5, 13.5]
    assert second["info", "deep", "er"][:, 1].tolist() == [11, 12, 13]
    assert (first["terminated"].tolist(), second["truncated"].tolist()) == ([False, True], [False, False, True])


def test_a_new_buffer_has_the_dtypes_of_for_env() -> None:
    for dataset in (make_collected(), to_minari(make_rich_replay(), "test/rich-v0")):
        env = gym.Env()
        env.observation_space, env.action_space = dataset.observation_space, dataset.action_space
        made, expected = from_minari(dataset), rl.ReplayBuffer.for_env(env, 10)
        dtypes = [dict(zip(one._schema.paths, one._schema.fields, strict=True)) for one in (made, expected)]
        assert {path: field for path, field in dtypes[0].items() if path[0] != "info"} == dtypes[1]
        assert torch.float64 not in {field.dtype for field in dtypes[0].values()}


class TestSpace:
    """Buffers that are too small for five steps in two episodes, with a final observation per episode."""

    @pytest.mark.parametrize(("capacity", "lost"), [(7, 0), (4, 2), (3, 2), (2, 3)])
    def test_a_replay_buffer_says_how_many_steps_did_not_fit(self, capacity: int, lost: int) -> None:
        dataset = make_collected()
        replay = rl.ReplayBuffer(capacity, obs={"x": 2}, action=1)
        # Rows of an earlier read do not count.
        for _ in range(2):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                from_minari(dataset, replay)
            assert len(replay) == 5 - lost
            messages = [str(each.message) for each in said if issubclass(each.category, rl.DataWarning)]
            assert len(messages) == bool(lost)
            for message in messages:
                expected = f"from_minari: expected room for 5 steps, got room for {5 - lost}. {lost} steps did not fit"
                assert message.startswith(expected)

    def test_the_space_of_several_environments_counts_together(self) -> None:
        replay = rl.ReplayBuffer(4, obs={"x": 2}, action=1, num_envs=2)
        with pytest.warns(rl.DataWarning, match="expected room for 5 steps, got room for 4. 1 step did not fit"):
            from_minari(make_collected(), replay)
        assert len(replay) == 4

    def test_a_distillation_buffer_warns_about_steps_that_did_not_fit(self) -> None:
        buffer = rl.DistillationBuffer(4, obs={"x": 2}, action=1)
        buffer.add({"x": np.zeros((3, 2))}, np.zeros((3, 1)))
        with pytest.warns(rl.DataWarning, match="expected room for 5 steps, got room for 4. 1 step did not fit"):
            from_minari(make_collected(), buffer)

    def test_a_rollout_refuses_before_the_first_step(self) -> None:
        rollout = rl.RolloutBuffer(4, None, obs={"x": 2}, action=1)
        with pytest.raises(rl.BufferFullError, match="from_minari: expected room for 5 steps, got room for 4. 1 step "):
            from_minari(make_collected(), rollout)
        assert rollout.num_stored == 0


def test_infos_are_chosen_by_name() -> None:
    replay = from_minari(make_collected(), infos=("level",))
    assert set(next(replay.episodes())["info"].keys()) == {"level"}
    assert "info" not in next(from_minari(load_collected(), infos=()).episodes()).keys()
    with pytest.raises(
        rl.SchemaError, match="episode 0: infos: expected 'speed' in every episode, got an episode with deep, level"
    ):
        from_minari("test/collected-v0", infos=("speed",))


def load_collected() -> Any:
    return minari.load_dataset("test/collected-v0")


def test_the_callers_buffer_gets_the_infos_that_it_declares() -> None:
    make_collected()
    replay = rl.ReplayBuffer(50, obs={"x": 2}, action=1, extra={"level": ()}, num_envs=2, sampler=rl.Prioritized())
    assert from_minari("test/collected-v0", replay) is replay
    by_env = {int(episode["index"][0]) % 2: episode for episode in replay.episodes()}
    assert by_env[0]["obs", "x"][:, 0].tolist() == [0, 1]
    assert by_env[1]["level"].tolist() == [11.5, 12.5, 13.5]
    assert by_env[1]["obs", "x"].dtype == torch.float32
    wrong = rl.ReplayBuffer(50, obs={"x": 2}, action=1, extra={"speed": ()})
    words = r"episode 0: expected an info for each extra field \(deep, level\), got 'speed'"
    with pytest.raises(rl.SchemaError, match=words):
        from_minari("test/collected-v0", wrong)
    assert len(wrong) == 0


def test_episodes_stay_separate_in_a_buffer_with_next_step_autoreset() -> None:
    make_collected()
    replay = rl.ReplayBuffer(50, obs={"x": 2}, action=1, autoreset="NEXT_STEP", stats=rl.EpisodeStats(None))
    from_minari("test/collected-v0", replay)
    assert [len(episode["index"]) for episode in replay.episodes()] == [2, 3]
    assert replay.stats is not None
    assert replay.stats.episodes()["return"].tolist() == [1, 33]


def test_texts_in_infos_are_refused_and_can_be_left_out() -> None:
    replay = rl.ReplayBuffer(9, obs=1, action=())
    replay.add([0], 0.0, 0.0, True, False, next_obs=[1])
    dataset = to_minari(replay, "test/words-v0")
    words = minari.data_collector.EpisodeBuffer(
        observations=np.zeros((2, 1), np.float32), actions=np.zeros(1, np.float32), rewards=[0.0],
        terminations=[True], truncations=[False], infos={"word": ["a", "b"]},
    )  # fmt: skip
    dataset.update_dataset_from_buffer([words])
    with pytest.raises(rl.SchemaError, match="episode 1: infos: word: expected numbers, an entry for each of 1 steps"):
        from_minari(dataset)
    assert len(from_minari(dataset, infos=())) == 2


def test_long_reads_show_a_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_collected()
    monkeypatch.setattr(progress, "_DELAY_SECONDS", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    from_minari("test/collected-v0")
    said = capsys.readouterr().err
    assert "reading episodes" in said
    assert "5/5" in said


def test_a_dataset_is_inspected_by_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_collected()
    folder = tmp_path / "minari" / "test" / "collected-v0"
    actual = rl.inspect(folder, html=tmp_path / "page.html").as_dict()
    assert (actual["source"]["kind"], actual["source"]["rows"], actual["source"]["episodes"]) == ("MinariDataset", 5, 2)
    assert actual["episodes"]["returns"]["mean"] == (1 + 33) / 2
    assert actual["episodes"]["ends"] == {"terminated": 1, "truncated": 1, "cut": 0, "running": 0}
    fields = {field["name"]: field for field in actual["fields"]}
    assert [fields["obs.x"]["dimensions"][1][name] for name in ("min", "max")] == [-12, 0]
    assert fields["info.deep.er"]["max"] == 13
    assert fields["info.level"]["mean"] == (1.5 + 2.5 + 11.5 + 12.5 + 13.5) / 5
    assert rl.inspect(load_collected()).as_dict()["fields"] == actual["fields"]
    assert main(["inspect", str(folder)]) == 0
    assert "MinariDataset" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["metadata.json", "main_data.hdf5"])
def test_inspecting_a_damaged_dataset_exits_with_one(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(make_collected().storage.data_path)
    (data / damage).write_text('{"data_format": "hdf5"}')
    assert main(["inspect", str(data)]) == 1
    assert capsys.readouterr().err.startswith("relive inspect: ")


def test_reports_on_a_buffer_and_on_its_dataset_agree() -> None:
    replay = make_rich_replay()
    mine, theirs = rl.inspect(replay).as_dict(), rl.inspect(to_minari(replay, "test/rich-v0")).as_dict()
    assert mine["episodes"] == theirs["episodes"]
    assert mine["reward"] == theirs["reward"]
    named = {field["name"]: field for field in mine["fields"]}
    for field in theirs["fields"]:
        twin = named[field["name"]]
        for name in ("min", "mean", "max", "std"):
            assert twin[name] == pytest.approx(field[name], rel=1e-9)
