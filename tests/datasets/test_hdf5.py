"""HDF5 files of robomimic and D4RL: a buffer stores ends of episodes as the writers of the files meant them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.datasets import from_hdf5

h5py = pytest.importorskip("h5py", reason='needs HDF5: pip install ".[hdf5]"')

SAMPLES = Path(__file__).parent / "samples"


def flags(replay: rl.ReplayBuffer) -> list[str]:
    """Return each episode as text with a letter per step: t for terminated, c for truncated."""
    letters = {(False, False): "-", (True, False): "t", (False, True): "c"}
    return [
        "".join(letters[pair] for pair in zip(one["terminated"].tolist(), one["truncated"].tolist(), strict=True))
        for one in replay.episodes()
    ]


class TestRobomimic:
    def test_a_file_of_the_original_writer_is_read(self) -> None:
        replay = from_hdf5(SAMPLES / "robomimic.hdf5", seed=0)
        assert flags(replay) == ["---c", "--t", "---c"], "a horizon is no end of the task, a success is"
        assert (len(replay), replay.capacity) == (11, 11 + 3)
        episodes = list(replay.episodes())
        assert episodes[1]["obs", "count"].tolist() == [[1, 0], [1, 1], [1, 2]]
        assert episodes[1]["next_obs", "count"].tolist() == [[1, 1], [1, 2], [1, 3]]
        assert episodes[2]["next_obs", "camera_image"][:, 0, 0, 0].tolist() == [21, 22, 23, 24]
        assert episodes[2]["obs", "camera_image"].dtype == torch.uint8
        assert episodes[2]["reward"].tolist() == [21, 22, 23, 24]
        assert episodes[2]["states"].tolist() == [[2, 0], [2, 1], [2, 2], [2, 3]]
        assert episodes[2]["action"].tolist() == [[2.5, 1]] * 4

    def test_demonstrations_come_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "f.hdf5", "w") as file:
            for number in (10, 2, 0):
                file[f"data/demo_{number}/obs/x"] = np.full((2, 1), number, np.float32)
                file[f"data/demo_{number}/actions"] = np.zeros((2, 1), np.float32)
        replay = from_hdf5(tmp_path / "f.hdf5", final_obs="repeat")
        assert [one["obs", "x"][0].item() for one in replay.episodes()] == [0, 2, 10]

    def test_a_done_inside_a_demonstration_ends_it_there(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "f.hdf5", "w") as file:
            file["data/demo_0/obs/x"] = np.arange(5.0)[:, None]
            file["data/demo_0/next_obs/x"] = np.arange(1.0, 6)[:, None]
            file["data/demo_0/actions"] = np.zeros((5, 1))
            file["data/demo_0/dones"] = np.array([0, 0, 1, 1, 1])
        replay = from_hdf5(tmp_path / "f.hdf5")
        assert flags(replay) == ["--t", "t", "t"]
        assert replay[replay.ids()]["next_obs", "x"].squeeze(1).tolist() == [1, 2, 3, 4, 5]

    def test_states_alone_are_no_observations(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "f.hdf5", "w") as file:
            file["data/demo_0/states"] = np.arange(6.0).reshape(3, 2)
            file["data/demo_0/actions"] = np.zeros((3, 1))
        with pytest.raises(
            rl.SchemaError, match="f.hdf5: expected a column for 'obs', got the columns actions, states"
        ):
            from_hdf5(tmp_path / "f.hdf5")
        replay = from_hdf5(tmp_path / "f.hdf5", columns={"states": "obs"}, final_obs="drop")
        assert replay[replay.ids()]["next_obs"].tolist() == [[2, 3], [4, 5]]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda demo: demo.__delitem__("rewards"), "data/demo_1/rewards: expected float64 of shape .., as in"),
            (lambda demo: demo.create_dataset("more", data=np.zeros(3)), "data/demo_1/more: expected no array, as in"),
            (lambda demo: demo.create_dataset("more", data=np.zeros(2)), "data/demo_1/more: expected 3 rows, got"),
            (lambda demo: demo["next_obs"].__delitem__("count"), "data/demo_1/next_obs/count: expected float32 of"),
            (lambda demo: demo.__delitem__("actions"), "data/demo_1: expected the array 'actions'"),
        ],
    )  # fmt: skip
    def test_demonstrations_with_other_columns_are_refused(self, change: Any, words: str, tmp_path: Path) -> None:
        (tmp_path / "f.hdf5").write_bytes((SAMPLES / "robomimic.hdf5").read_bytes())
        with h5py.File(tmp_path / "f.hdf5", "a") as file:
            change(file["data/demo_1"])
        with pytest.raises(rl.SchemaError, match=words):
            from_hdf5(tmp_path / "f.hdf5")


class TestD4RL:
    def test_a_file_of_the_original_writer_is_read(self) -> None:
        replay = from_hdf5(SAMPLES / "d4rl.hdf5")
        assert flags(replay) == ["----c", "--t", "----c"]
        assert (len(replay), replay.capacity) == (13, 13 + 3)
        first, second, _ = replay.episodes()
        assert first["next_obs"][-1].tolist() == [0, 5], "the file has it, also across a timeout"
        assert second["next_obs"].tolist() == [[1, 1], [1, 2], [1, 3]]
        assert second["reward"].tolist() == [11, 12, 13]
        assert second["infos", "qpos"].squeeze(1).tolist() == [5, 1, 2]

    def write(self, path: Path, **changes: Any) -> Path:
        """Write a copy of the sample without next observations, like most files of D4RL."""
        with h5py.File(SAMPLES / "d4rl.hdf5") as old, h5py.File(path / "f.hdf5", "w") as new:
            arrays = {name: old[name][:] for name in ("observations", "actions", "rewards", "terminals", "timeouts")}
            for name, value in {**arrays, **changes}.items():
                if value is not None:
                    new[name] = value
        return path / "f.hdf5"

    def test_a_next_observation_across_a_timeout_is_unknown(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        words = "expected a next observation for every step, got 2 last steps without. They were left out"
        with pytest.warns(rl.DataWarning, match=words):
            replay = from_hdf5(path)
        assert flags(replay) == ["---c", "--t", "---c"]
        first, second, _ = replay.episodes()
        assert first["next_obs"].tolist() == [[0, 1], [0, 2], [0, 3], [0, 4]], "true ones, none of the next episode"
        assert second["next_obs"].tolist() == [[1, 1], [1, 2], [1, 2]], "of a terminated step nothing bootstraps"

    def test_final_obs_decides_about_steps_without_next_observation(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        dropped, repeated = (from_hdf5(path, final_obs=choice) for choice in ("drop", "repeat"))
        assert flags(dropped) == ["---c", "--t", "---c"]
        assert flags(repeated) == ["----c", "--t", "----c"]
        assert next(repeated.episodes())["next_obs"][-1].tolist() == [0, 4]
        buffer = rl.DistillationBuffer(20, obs=2, action=2)
        from_hdf5(path, buffer)
        assert len(buffer) == 13, "imitation needs no next observation"

    @pytest.mark.filterwarnings("ignore::relive.DataWarning")
    @pytest.mark.parametrize("final_obs", ["drop", None])
    def test_steps_that_are_left_out_take_no_room_in_a_rollout(self, final_obs: Any, tmp_path: Path) -> None:
        path = self.write(tmp_path, timeouts=np.arange(13) % 13 == 12)
        full, small = (rl.RolloutBuffer(size, None, 2, 2) for size in (12, 11))
        assert from_hdf5(path, full, final_obs=final_obs).is_full
        with pytest.raises(rl.BufferFullError, match="expected room for 12 steps, got room for 11. 1 step did"):
            from_hdf5(path, small, final_obs=final_obs)
        with pytest.raises(rl.BufferFullError, match="expected room for 13 steps, got room for 11. 2 steps did"):
            from_hdf5(path, small, final_obs="repeat")
        assert not small.num_stored

    def test_a_file_may_stop_inside_an_episode(self, tmp_path: Path) -> None:
        ends = np.zeros(13, bool)
        ends[4] = True
        replay = from_hdf5(self.write(tmp_path, timeouts=ends), final_obs="repeat")
        assert flags(replay) == ["----c", "--t", "-----"]

    def test_a_file_without_timeouts_needs_the_time_limit(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, timeouts=None)
        with pytest.raises(rl.SchemaError, match="f.hdf5: expected the array 'timeouts', got .* Pass time_limit="):
            from_hdf5(path)
        assert flags(from_hdf5(path, time_limit=5, final_obs="repeat")) == ["----c", "--t", "----c"]
        assert flags(from_hdf5(path, time_limit=3, final_obs="repeat")) == ["--c", "--c", "-t", "--c", "-c"]

    def test_flags_may_be_numbers_with_an_axis(self, tmp_path: Path) -> None:
        with h5py.File(SAMPLES / "d4rl.hdf5") as file:
            changes = {name: file[name][:].astype(np.float32)[:, None] for name in ("terminals", "timeouts", "rewards")}
        replay = from_hdf5(self.write(tmp_path, **changes), final_obs="repeat")
        assert flags(replay) == ["----c", "--t", "----c"]
        assert next(replay.episodes())["reward"].tolist() == [1, 2, 3, 4, 5]
        vectors = from_hdf5(tmp_path / "f.hdf5", rl.ReplayBuffer(20, 2, 2, reward=(1,)), final_obs="repeat")
        assert next(vectors.episodes())["reward"].tolist() == [[1], [2], [3], [4], [5]]

    def test_the_policy_in_a_file_is_left_out(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, **{"metadata/policy/fc0/weight": np.zeros((3, 3)), "metadata/algorithm": b"SAC"})
        assert len(from_hdf5(path, final_obs="drop")) == 11

    def test_arrays_of_another_length_are_refused_or_left_out(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, more=np.zeros(5))
        with pytest.raises(rl.SchemaError, match="f.hdf5: more: expected 13 rows, got shape"):
            from_hdf5(path)
        assert len(from_hdf5(path, columns={"more": None}, final_obs="drop")) == 11

    @pytest.mark.parametrize("flag", ["terminals", "timeouts"])
    def test_flags_are_zeros_and_ones(self, flag: str, tmp_path: Path) -> None:
        with pytest.raises(rl.SchemaError, match=f"f.hdf5: {flag}: expected a 0 or 1 per step"):
            from_hdf5(self.write(tmp_path, **{flag: np.arange(13.0)}))


class TestColumns:
    def test_columns_are_renamed_left_out_and_moved(self) -> None:
        columns = {"obs/camera_image": None, "obs/count": "obs.at", "states": "obs.state"}
        replay = from_hdf5(SAMPLES / "robomimic.hdf5", columns={"obs/camera_image": None, "states": None})
        assert set(replay.columns.keys(True, True)) == {
            ("obs", "count"), "action", "reward", "terminated", "truncated"
        }  # fmt: skip
        with pytest.raises(rl.SchemaError, match="data/demo_0: expected the array 'next_states', got obs/count only"):
            from_hdf5(SAMPLES / "robomimic.hdf5", columns=columns)
        replay = from_hdf5(SAMPLES / "d4rl.hdf5", columns={"infos": "more", "observations": "obs.state"})
        assert next(replay.episodes())["more", "qpos"].shape == (5, 1)
        assert next(replay.episodes())["next_obs", "state"].shape == (5, 2)
        replay = from_hdf5(SAMPLES / "d4rl.hdf5", columns={"infos": None})
        assert "infos" not in replay.columns.keys()

    def test_unknown_columns_are_refused(self) -> None:
        words = "d4rl.hdf5: expected one of the columns actions, .* got 'speed'. Correct columns="
        with pytest.raises(rl.SchemaError, match=words):
            from_hdf5(SAMPLES / "d4rl.hdf5", columns={"speed": None})
        with pytest.raises(rl.SchemaError, match="Correct encode="):
            from_hdf5(SAMPLES / "d4rl.hdf5", encode={"speed": len})
        with pytest.raises(rl.SchemaError, match="d4rl.hdf5: rewards: expected texts to encode, got dtype float32"):
            from_hdf5(SAMPLES / "d4rl.hdf5", encode={"rewards": len})

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            (
                "columns",
                [3, 0, "obs", ["rewards"], [("rewards", "obs")], {"rewards": 3}, {"rewards": ("obs",)}, {1: "x"}],
            ),
            ("encode", [3, 0, "task", ["task"], {"task": 3}, {"task": None}, {1: len}]),
        ],
    )
    def test_columns_and_encoders_are_dicts(self, name: str, values: list[Any]) -> None:
        for wrong in values:
            with pytest.raises(rl.SchemaError, match=rf"^{name}: expected .*, got .*\. Pass "):
                from_hdf5(SAMPLES / "d4rl.hdf5", **{name: wrong})

    @pytest.mark.parametrize("sample", ["d4rl.hdf5", "robomimic.hdf5"])
    def test_the_time_limit_is_checked_in_every_layout(self, sample: str) -> None:
        with pytest.raises(rl.SchemaError, match="time_limit: expected a positive int"):
            from_hdf5(SAMPLES / sample, time_limit=2.5)  # type: ignore[arg-type]

    def test_a_flag_has_no_parts(self) -> None:
        with pytest.raises(rl.SchemaError, match="terminals: expected one flag per step, got the part 'terminated.x'"):
            from_hdf5(SAMPLES / "d4rl.hdf5", columns={"terminals": "terminated.x"})

    def test_two_columns_cannot_be_one_field(self) -> None:
        for field in ("action", "obs.x", "reward"):
            with pytest.raises(rl.SchemaError, match="d4rl.hdf5: .*: expected one column per field, got .* twice"):
                from_hdf5(SAMPLES / "d4rl.hdf5", columns={"infos/qpos": field})

    def test_columns_and_fields_of_the_callers_buffer_must_match(self) -> None:
        bare = rl.ReplayBuffer(20, obs=2, action=2)
        words = (
            "d4rl.hdf5: infos/action_log_probs: expected a field 'infos' of the buffer, got none. Declare it in extra="
        )
        with pytest.raises(rl.SchemaError, match=words):
            from_hdf5(SAMPLES / "d4rl.hdf5", bare)
        assert len(from_hdf5(SAMPLES / "d4rl.hdf5", bare, columns={"infos": None})) == 13
        more = rl.ReplayBuffer(20, obs=2, action=2, extra={"speed": ()})
        with pytest.raises(rl.SchemaError, match="d4rl.hdf5: expected a column for 'speed', got the columns actions"):
            from_hdf5(SAMPLES / "d4rl.hdf5", more, columns={"infos": None})
        assert len(more) == 0

    def test_texts_are_encoded_or_left_out(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "f.hdf5", "w") as file:
            file["data/demo_0/obs/x"] = np.zeros((3, 1), np.float32)
            file["data/demo_0/actions"] = np.zeros((3, 1), np.float32)
            file["data/demo_0/language"] = ["lift", "lift", "place it"]
        words = "f.hdf5: language: expected numbers, got texts. Pass encode="
        with pytest.raises(rl.SchemaError, match=words):
            from_hdf5(tmp_path / "f.hdf5")
        assert len(from_hdf5(tmp_path / "f.hdf5", columns={"language": None}, final_obs="drop")) == 2
        encoded_texts: list[str] = []

        def embed(text: str) -> list[float]:
            encoded_texts.append(text)
            return [len(text), 1.0]

        replay = from_hdf5(tmp_path / "f.hdf5", encode={"language": embed}, final_obs="repeat")
        assert replay[replay.ids()]["language"].tolist() == [[4, 1], [4, 1], [8, 1]]
        assert encoded_texts == ["lift", "place it"], "each text once"
        encoders: list[Any] = [
            lambda text: [0] * len(text), lambda text: [[1], [1, 2]], lambda text: np.longdouble(1),
            lambda text: torch.zeros(3, requires_grad=True),
        ]  # fmt: skip
        for encode in encoders:
            with pytest.raises(rl.SchemaError, match="f.hdf5: language: expected numbers of one shape from encode="):
                from_hdf5(tmp_path / "f.hdf5", encode={"language": encode}, final_obs="repeat")

    def test_the_error_for_another_layout_names_the_contents(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "f.hdf5", "w") as file:
            file["other"] = 1
        words = r"f.hdf5: expected the group 'data' \(robomimic\) or the array 'observations' \(D4RL\), got other"
        with pytest.raises(rl.SchemaError, match=words):
            from_hdf5(tmp_path / "f.hdf5")
        with pytest.raises(rl.SchemaError, match="expected an HDF5 file that can be read"):
            from_hdf5(tmp_path / "none.hdf5")
        with pytest.raises(rl.SchemaError, match="from_hdf5: expected a buffer, got dict"):
            from_hdf5(SAMPLES / "d4rl.hdf5", {})
