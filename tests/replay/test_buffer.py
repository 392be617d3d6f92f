"""The methods of the replay buffer, and the arguments that each refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

import relive as rl
from tests.conftest import running
from tests.faults.digest import digest
from tests.layouts import Both
from tests.reference.sequences import around
from tests.scripted import Scripted, act
from tests.tiers import select


def fill(count: int, capacity: int = 16, **options: Any) -> rl.ReplayBuffer:
    """Return a buffer of `count` recognisable rows: obs = t, reward = 10·t, next_obs = t + 1."""
    replay = rl.ReplayBuffer(capacity, **{"obs": 1, "action": (), "seed": 0, **options})
    for t in range(count):
        replay.add([float(t)], t / 2, 10.0 * t, False, False, [t + 1.0])
    return replay


class TestMaking:
    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3", None])
    def test_a_capacity_is_a_positive_int(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="capacity: expected a positive int"):
            rl.ReplayBuffer(wrong, obs=1, action=())

    def test_a_capacity_is_a_multiple_of_the_environments(self) -> None:
        with pytest.raises(rl.SchemaError, match="capacity: expected a multiple of num_envs=4, got 10. Pass 8."):
            rl.ReplayBuffer(10, obs=1, action=(), num_envs=4)

    def test_more_memory_than_there_is_is_refused_before_anything_is_allocated(self) -> None:
        with pytest.raises(MemoryError, match=r"capacity: expected at most .* GiB, the free memory of this machine"):
            rl.ReplayBuffer(10**9, obs=(1000,), action=())

    def test_the_estimate_is_what_is_kept(self) -> None:
        kinds: list[dict[str, Any]] = [
            {"obs": 17, "action": 6},
            {"obs": {"a": 3, "b": rl.Stacked(rl.Field((4, 4), torch.uint8), 4)}, "action": gym.spaces.Discrete(2)},
            {"obs": 3, "action": 1, "num_envs": 5, "extra": {"x": (2, 2)}},
            {"obs": 3, "action": 1, "next_obs": "stored"},
        ]
        for options in kinds:
            assert rl.ReplayBuffer(100, **options).nbytes == rl.ReplayBuffer.estimate_bytes(100, **options)

    def test_a_transition_costs_what_the_bars_allow(self) -> None:
        flat = rl.ReplayBuffer.estimate_bytes(10**6, obs=17, action=6) / 10**6
        stack = rl.Stacked(rl.Field((84, 84), torch.uint8), 4)
        atari = rl.ReplayBuffer.estimate_bytes(10**5, obs=stack, action=gym.spaces.Discrete(18)) / 10**5
        assert flat <= 106
        assert atari <= 7_120

    @pytest.mark.parametrize("name", ["obs", "next_obs", "weight", "index", "discount", "train", "is_first"])
    def test_extra_cannot_take_a_reserved_name(self, name: str) -> None:
        with pytest.raises(rl.SchemaError, match=f"extra: expected other names than .*{name}.* reserved, got '{name}'"):
            rl.ReplayBuffer(4, obs=1, action=(), extra={name: 1})

    def test_settings_that_make_no_sense_are_refused(self) -> None:
        with pytest.raises(rl.SchemaError, match='next_obs: expected "shared" or "stored"'):
            fill(0, next_obs="twice")
        with pytest.raises(rl.SchemaError, match="reward: expected a floating-point field"):
            fill(0, reward=rl.Field((), torch.int64))
        with pytest.raises(rl.SchemaError, match="obs: expected a plain Field, got Stacked"):
            fill(0, obs=rl.Stacked(2, 3), next_obs="stored")
        with pytest.raises(rl.SchemaError, match="action: expected a plain Field, got Stacked"):
            fill(0, action=rl.Stacked(2, 3))

    def test_pinned_memory_needs_an_accelerator(self) -> None:
        if torch.accelerator.is_available():
            assert fill(3, device=rl.Memory.pinned()).storage.rows.leaves[0].is_pinned()
        else:
            with pytest.raises(
                rl.SchemaError, match="Memory.pinned: expected an accelerator, got a machine without one"
            ):
                rl.Memory.pinned()

    def test_for_env_takes_everything_from_the_environment(self) -> None:
        envs = gym.make_vec("CartPole-v1", 3)
        replay = rl.ReplayBuffer.for_env(envs, 30, sampler=rl.Prioritized())
        assert replay.num_envs == 3
        assert replay.autoreset is gym.vector.AutoresetMode.NEXT_STEP
        single = rl.ReplayBuffer.for_env(gym.make("CartPole-v1"), 30)
        assert single.num_envs is None

    def test_repr_says_what_is_in_it(self) -> None:
        assert repr(fill(3)).startswith("ReplayBuffer(3 of 16 rows, num_envs=None, fields=(obs, action, reward")

    def test_a_class_is_no_sampler_and_no_view(self) -> None:
        with pytest.raises(rl.SchemaError, match=r"sampler: expected Prioritized\(…\), got the class Prioritized"):
            fill(0, sampler=rl.Prioritized)
        with pytest.raises(rl.SchemaError, match=r"view: expected NStep\(…\), got the class NStep"):
            fill(3).sample(1, rl.NStep)  # type: ignore[arg-type]


class TestWriting:
    def test_dict_observations_and_extra_fields_of_any_kind(self, backend: str) -> None:
        obs = {"camera": rl.Field((2, 2), torch.uint8), "body": {"joints": 3, "mode": rl.Field((), torch.int64)}}
        replay = rl.ReplayBuffer(
            8, obs=obs, action=2, extra={"privileged": {"mass": ()}, "skill": rl.Field((), torch.int16)}
        )

        def observe(t: int) -> dict[str, Any]:
            body = {"joints": np.full(3, t, np.float64), "mode": t}
            return {"camera": np.full((2, 2), t, np.uint8), "body": body}

        for t in range(5):
            extra = {"privileged": {"mass": t / 2}, "skill": np.int16(t)}
            replay.add(observe(t), [0.0, t], 1.0, False, False, observe(t + 1), **extra)
        batch = replay.sample(30)
        t = batch["obs", "body", "mode"]
        assert torch.equal(batch["next_obs", "body", "mode"], t + 1)
        assert torch.equal(batch["next_obs", "camera"][:, 0, 0], (t + 1).to(torch.uint8))
        assert torch.equal(batch["obs", "body", "joints"][:, 2], t.float())
        assert torch.equal(batch["privileged", "mass"], t / 2)
        assert torch.equal(batch["skill"], t.to(torch.int16))

    def test_env_ids_in_any_order(self, backend: str) -> None:
        replay = rl.ReplayBuffer(30, obs=1, action=(), num_envs=3)
        flags = np.zeros(2, bool)
        replay.add(
            np.array([[2.0], [0.0]]), np.zeros(2), np.array([2.0, 0.0]), flags, flags, np.ones((2, 1)), env_ids=[2, 0]
        )
        assert sorted((replay.sample(50)["index"] % 3).unique().tolist()) == [0, 2]
        rows = replay[torch.tensor([0, 2])]
        assert rows["reward"].tolist() == [0.0, 2.0]

    def test_what_was_accepted_once_does_not_vouch_for_what_only_equals_it(self, backend: str) -> None:
        replay = rl.ReplayBuffer(90, obs=1, action=(), num_envs=3)
        step = ([[1.0]], [0.0], [0.0], [False], [False], [[2.0]])
        for _ in range(2):
            for right in ([1], np.array([1]), torch.tensor([1], dtype=torch.int32)):
                replay.add(*step, env_ids=right)
            for wrong in ([True], np.array([True]), [1.0], np.array([[1]]), torch.tensor(1)):
                with pytest.raises(rl.SchemaError, match="env_ids"):
                    replay.add(*step, env_ids=wrong)
        assert len(replay) == 6

    def test_cut_separates_what_would_have_been_one_episode(self, backend: str) -> None:
        replay = fill(3)
        replay.cut()
        replay.cut()
        replay.add([3.0], 1.5, 30.0, False, False, [4.0])
        assert [len(episode) for episode in replay.episodes()] == [3, 1]
        batch = replay.sample(60, rl.NStep(4, 1.0))
        # The rewards 0, 10 and 20 are of the first episode, and 30 is alone in the second.
        assert set(batch["reward"].tolist()) == {0 + 10 + 20.0, 10 + 20.0, 20.0, 30.0}

    def test_continuity_is_bitwise_after_the_cast(self, backend: str) -> None:
        replay = rl.ReplayBuffer(16, obs=1, action=())
        third = 1 / 3
        replay.add(np.array([0.0]), 0.0, 0.0, False, False, np.array([third]))
        replay.add(np.array([third]), 0.0, 1.0, False, False, np.array([np.nan]))
        replay.add(np.array([np.nan]), 0.0, 2.0, False, False, np.array([0.0]))
        assert [len(episode) for episode in replay.episodes()] == [3]
        replay.add(np.array([-0.0]), 0.0, 3.0, False, False, np.array([1.0]))
        assert [len(episode) for episode in replay.episodes()] == [3, 1]

    def test_staged_fields_are_completed_by_add_or_add_step(self) -> None:
        envs = gym.make_vec("CartPole-v1", 2)
        replay = rl.ReplayBuffer.for_env(envs, 40)
        obs, _ = envs.reset(seed=0)
        for _ in range(5):
            replay.stage(obs=obs, action=np.ones(2, int))
            step = envs.step(np.ones(2, int))
            replay.add_step(step=step)
            obs = step[0]
        assert len(replay) == 10
        replay.stage(obs=obs)
        with pytest.raises(rl.SchemaError, match="obs: expected one value per step, got a second value"):
            replay.add_step(obs, np.ones(2, int), envs.step(np.ones(2, int)))
        with pytest.raises(rl.SchemaError, match="obs: expected one value per step, got a second value"):
            replay.stage(obs=obs)
        with pytest.raises(rl.SchemaError, match="extend: expected no staged fields"):
            replay.extend(
                dict.fromkeys(("obs", "action", "reward", "terminated", "truncated", "next_obs"), np.zeros(2))
            )

    def test_unordered_rows_go_into_a_buffer_with_stored_next_observations(self, backend: str) -> None:
        replay = rl.ReplayBuffer(10, obs=2, action=(), next_obs="stored")
        random = np.random.default_rng(0)
        block = {
            "obs": random.normal(size=(25, 2)), "action": np.zeros(25), "reward": np.arange(25.0),
            "terminated": random.random(25) < 0.5, "truncated": np.zeros(25, bool),
            "next_obs": random.normal(size=(25, 2)),
        }  # fmt: skip
        replay.extend(block)
        assert len(replay) == 10
        batch = replay.sample(40)
        row = batch["reward"].long().numpy()
        assert set(row.tolist()) <= set(range(15, 25))
        assert np.allclose(batch["obs"].numpy(), block["obs"][row].astype(np.float32))
        assert np.allclose(batch["next_obs"].numpy(), block["next_obs"][row].astype(np.float32))
        for view in (rl.NStep(2, 0.9), rl.Sequence(2), rl.Hindsight(("obs",), ("obs",), lambda a, g, rows: (a, g))):
            with pytest.raises(rl.SchemaError, match="expected rows in time order"):
                replay.sample(2, view)

    @pytest.mark.parametrize("kind", ["dict", "tensordict"])
    def test_blocks_come_as_dicts_or_tensordicts(self, backend: str, kind: str) -> None:
        block: Any = {
            "obs": torch.arange(12.0).view(4, 3, 1), "next_obs": torch.arange(3.0, 15.0).view(4, 3, 1),
            "action": torch.zeros(4, 3), "reward": torch.arange(12.0).view(4, 3),
            "terminated": torch.zeros(4, 3, dtype=torch.bool), "truncated": torch.zeros(4, 3, dtype=torch.bool),
        }  # fmt: skip
        block = TensorDict(block, [4, 3]) if kind == "tensordict" else block
        replay = rl.ReplayBuffer(30, obs=1, action=(), num_envs=3)
        replay.extend(block)
        assert len(replay) == 12
        assert torch.equal(replay[torch.arange(12)]["reward"], torch.arange(12.0))
        with pytest.raises(rl.SchemaError, match="extend: expected the fields"):
            replay.extend({"obs": torch.zeros(4, 3, 1)})
        with pytest.raises(rl.SchemaError, match="^next_obs: expected shape"):
            replay.extend({**dict(block), "next_obs": torch.zeros(4, 1, 1)})
        with pytest.raises(rl.SchemaError, match="extend: expected at least one step, got 0"):
            replay.extend({name: value[:0] for name, value in dict(block).items()})
        assert len(replay) == 12

    @pytest.mark.parametrize("kind", [torch.zeros, np.zeros])
    def test_a_block_whose_next_observations_are_its_observations_is_refused(self, kind: Any) -> None:
        replay = rl.ReplayBuffer(30, obs=1, action=(), next_obs="stored")
        path = kind((5, 1))
        path[:, 0] += torch.arange(5.0) if kind is torch.zeros else np.arange(5.0)
        rest = {"action": np.zeros(4), "reward": np.zeros(4), **dict.fromkeys(("terminated", "truncated"), [False] * 4)}
        with pytest.raises(
            rl.SchemaError, match="next_obs: expected memory apart from obs, got memory shared with obs"
        ):
            replay.extend({**rest, "obs": path[:4], "next_obs": path[:4]})
        # In a block, observations and next observations may come from the same array of a whole episode.
        replay.extend({**rest, "obs": path[:-1], "next_obs": path[1:]})
        assert replay[replay.ids()]["next_obs"].flatten().tolist() == [1.0, 2.0, 3.0, 4.0]

    def test_a_single_scripted_environment_reset_by_hand(self, backend: str) -> None:
        env = Scripted(0, ((3, "terminated"), (2, "truncated")))
        replay = rl.ReplayBuffer.for_env(env, 50)
        obs, _ = env.reset()
        for _ in range(10):
            action = int(act(obs))
            step = env.step(action)
            replay.add_step(obs, action, step)
            obs = env.reset()[0] if step[2] or step[3] else step[0]
        assert [len(episode) for episode in replay.episodes()] == [3, 2, 3, 2]

    def test_same_step_needs_the_final_observation_of_every_end(self) -> None:
        replay = rl.ReplayBuffer(8, obs=1, action=(), num_envs=2, autoreset="SAME_STEP")
        step = (np.zeros((2, 1)), np.zeros(2), np.array([False, True]), np.zeros(2, bool), {})
        with pytest.raises(
            rl.SchemaError, match="info.*: expected an observation for environment 1, got observations for environments"
        ):
            replay.add_step(np.ones((2, 1)), np.zeros(2), step)
        assert len(replay) == 0


class TestStatistics:
    def counted(self, **options: Any) -> tuple[rl.ReplayBuffer, rl.EpisodeStats]:
        stats = rl.EpisodeStats(3)
        return rl.ReplayBuffer(12, obs=1, action=(), num_envs=3, stats=stats, **options), stats

    def running(self, stats: rl.EpisodeStats) -> list[list[float]]:
        """Return the return and the length of the running episode of each environment."""
        return stats.snapshot()["open"].T.tolist()

    def test_that_fail_leave_the_buffer_as_it_was(self, backend: str) -> None:
        stats = rl.EpisodeStats(None)
        replay = rl.ReplayBuffer(4, obs=1, action=(), sampler=rl.Prioritized(), stats=stats, seed=0)
        stats.restore(stats.snapshot() | {"counts": torch.tensor([0, 2**53])})
        with pytest.raises(
            OverflowError, match="update: expected at most 2\\^53 steps, got 9007199254740992 and 1 more"
        ):
            replay.add([0.0], 0.0, 7.0, False, False, [1.0])
        assert len(replay) == 0
        stats.clear()
        replay.add([0.0], 0.0, 8.0, False, False, [1.0])
        assert replay.sample(2)["reward"].tolist() == [8.0, 8.0]

    def step(self, rewards: list[float], ends: list[bool]) -> dict[str, Any]:
        n = len(rewards)
        obs = np.arange(float(n))[:, None]
        return {"obs": obs, "action": np.zeros(n), "reward": np.array(rewards), "terminated": np.array(ends),
                "truncated": np.zeros(n, bool), "next_obs": obs + 0.5}  # fmt: skip

    def test_of_reset_rows_and_blocks(self, backend: str) -> None:
        replay, stats = self.counted(autoreset="NEXT_STEP")
        replay.add(**self.step([1.0] * 3, [False, True, False]))
        replay.add(**self.step([2.0] * 3, [False] * 3))
        rows = [self.step([t] * 3, [True, False, False]) for t in (3.0, 4.0, 5.0)]
        replay.extend({name: np.stack([row[name] for row in rows]) for name in rows[0]})
        assert stats.episodes()["return"].tolist() == [1.0, 6.0, 5.0]
        assert stats.episodes()["step"].tolist() == [3, 8, 13]
        assert self.running(stats) == [[0.0, 0.0], [12.0, 3.0], [15.0, 5.0]]

    def test_not_of_a_refused_step(self) -> None:
        stats = rl.EpisodeStats(3)
        replay = rl.ReplayBuffer(12, obs=1, action=(), num_envs=3, stats=stats)
        with pytest.raises(rl.SchemaError):
            replay.add(**{**self.step([1.0] * 3, [True] * 3), "obs": np.zeros(3)})
        assert (stats.num_steps, stats.num_episodes) == (0, 0)


class TestReading:
    def test_the_default_batch_has_these_fields(self, backend: str) -> None:
        batch = fill(5, extra={}).sample(3)
        names = {"obs", "action", "reward", "terminated", "truncated", "next_obs", "index"}
        assert set(batch.keys()) == names
        assert batch.batch_size == torch.Size([3])
        assert set(fill(5, sampler=rl.Prioritized()).sample(3).keys()) == names | {"weight"}

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None])
    def test_a_batch_size_is_a_positive_int(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="sample: expected a positive int"):
            fill(5).sample(wrong)

    @pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(2, 0.9), rl.Sequence(3, burn_in=1)])
    def test_out_is_filled_and_returned(self, backend: str, view: Any) -> None:
        replay = fill(12)
        out = replay.sample(5, view)
        addresses = [leaf.data_ptr() for leaf in out.values(True, True)]
        assert replay.sample(5, view, out=out) is out
        assert [leaf.data_ptr() for leaf in out.values(True, True)] == addresses
        again = fill(12)
        again.sample(5, view)
        assert (again.sample(5, view) == out).all()
        with pytest.raises(rl.SchemaError, match=r"out\.obs: expected contiguous"):
            replay.sample(6, view, out=out)
        with pytest.raises(rl.SchemaError, match="out: expected the fields"):
            replay.sample(5, view, out=out.exclude("action"))

    def test_device_moves_the_batch(self) -> None:
        assert fill(5).sample(3, device="meta")["obs"].device.type == "meta"

    def test_rows_by_their_numbers(self, backend: str) -> None:
        replay = fill(20)
        rows = replay[[5, 19, 7]]
        assert rows["reward"].tolist() == [50.0, 190.0, 70.0]
        assert rows["index"].tolist() == [5, 19, 7]
        with pytest.raises(IndexError, match="expected stored rows, got 3, which was overwritten"):
            replay[[5, 3]]
        for never in (20, -1, 2**40):
            with pytest.raises(IndexError, match="expected the id of a stored transition"):
                replay[[never]]
        assert replay[np.array([7, 5])[::-1]]["reward"].tolist() == [50.0, 70.0]
        for wrong in ([0.5], [[1]], "x", None, [None]):
            with pytest.raises(rl.SchemaError, match="^index: expected"):
                replay[wrong]

    def test_one_number_is_one_row(self, backend: str) -> None:
        replay = fill(20)
        assert replay[19]["reward"].item() == 190.0
        for never in (20, -1, 2**40):
            with pytest.raises(IndexError, match="expected the id of a stored transition"):
                replay[never]

    def test_episodes_may_be_read_while_rows_are_overwritten(self, backend: str) -> None:
        replay = fill(16)
        episodes = replay.episodes()
        for t in range(16, 20):
            replay.add([float(t)], 0.0, 10.0 * t, False, False, [t + 1.0])
        assert [episode["index"].tolist() for episode in episodes] == [list(range(4, 16))]

    def test_an_empty_buffer_has_no_episodes(self, backend: str) -> None:
        replay = fill(0)
        assert list(replay.episodes()) == []
        with pytest.raises(
            rl.NotReadyError, match="sample: expected at least 1 stored transition, got 0. Add steps first."
        ):
            replay.sample(1)

    def test_clear_forgets_what_was_staged(self) -> None:
        replay = fill(2)
        replay.stage(obs=[5.0])
        replay.clear()
        replay.add([7.0], 0.0, 1.0, False, False, [8.0])
        assert replay.sample(1)["obs"].item() == 7.0

    @pytest.mark.parametrize("ended", [None, False, True])
    def test_a_cleared_buffer_and_its_checkpoint_have_equal_states(
        self, backend: str, tmp_path: Path, ended: bool | None
    ) -> None:
        replay = fill(20, capacity=8)
        replay.clear()
        replay.save(tmp_path)
        loaded: Any = rl.load(tmp_path)
        # After the end of an episode, the next slot is empty.
        if ended is not None:
            for each in (replay, loaded):
                each.add([0.0], 0.0, 0.0, ended, False, [1.0])
        (values, arrays), (loaded_values, loaded_arrays) = (
            (state.values, state.arrays) for state in (replay.state(), loaded.state())
        )
        assert values == loaded_values
        assert arrays.keys() == loaded_arrays.keys()
        for name, array in arrays.items():
            assert torch.equal(array, loaded_arrays[name]), name

    def test_few_rows_among_many_slots_are_found(self, backend: str) -> None:
        replay = rl.ReplayBuffer(64 * 100, obs=1, action=(), num_envs=64, seed=0)
        one = np.zeros(1, bool)
        for t in range(100):
            replay.add(
                np.array([[float(t)]]), np.zeros(1), np.array([float(t)]), one, one, np.array([[t + 1.0]]), env_ids=[63]
            )
        assert len(replay) == 100
        assert len(replay.sample(2000)["reward"].unique()) == 100

    @pytest.mark.parametrize(("next_obs", "slots"), [("shared", 5), ("stored", 4)])
    def test_the_columns_are_the_memory(self, next_obs: Any, slots: int) -> None:
        replay = fill(6, capacity=4, next_obs=next_obs)
        columns = replay.columns
        assert columns.batch_size == (slots, 1)
        row = 5 % slots
        assert columns["reward"][row].tolist() == [50.0]
        assert ("next_obs" in columns.keys()) == (next_obs == "stored")
        columns["reward"][row] = 77
        assert replay[5]["reward"] == 77


class TestFailing:
    """A call that raises leaves the buffer, its sampler and its generator unchanged.

    A caller's code that runs while a batch is read (`finish` of a view, `Hindsight.fn`) may fail after the draw.
    """

    def failing(self, replay: rl.ReplayBuffer) -> None:
        wrong = replay.sample(1).exclude("obs")
        with pytest.raises(rl.SchemaError):
            replay.sample(2, out=wrong)
        with pytest.raises(rl.SchemaError, match="device: expected a torch device"):
            replay.sample(2, device="nowhere")
        with pytest.raises(rl.SchemaError, match="sample: expected at most"):
            replay.sample(2**62)

    @pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()])
    def test_samples_have_not_happened(self, backend: str, sampler: Any) -> None:
        calm, shaken = fill(9, sampler=sampler), fill(9, sampler=sampler)
        calm.sample(1)
        self.failing(shaken)
        for _ in range(4):
            assert torch.equal(calm.sample(2)["index"], shaken.sample(2)["index"])

    @pytest.mark.parametrize("next_obs", ["shared", "stored"])
    def test_nothing_is_drawn_where_rows_are_no_transitions(self, backend: str, next_obs: Any) -> None:
        replay = rl.ReplayBuffer(8, obs=1, action=(), autoreset="NEXT_STEP", next_obs=next_obs, seed=3)
        replay.add([0.0], 0.0, 0.0, terminated=True, truncated=False, next_obs=[1.0])
        replay.clear()
        replay.add([1.0], 0.0, 0.0, terminated=False, truncated=False, next_obs=[2.0])
        before = replay.state_dict()["values"]["random"]
        with pytest.raises(rl.NotReadyError, match="sample: expected at least 1 stored transition, got 0"):
            replay.sample(4)
        assert replay.state_dict()["values"]["random"] == before

    @pytest.mark.parametrize("next_obs", ["shared", "stored"])
    @pytest.mark.parametrize(
        "sampler", select(rl.Prioritized(), of=[rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()])
    )
    def test_a_batch_without_memory_draws_nothing(self, backend: str, sampler: Any, next_obs: Any) -> None:
        replay = rl.ReplayBuffer(4, 1 << 20, (), sampler=sampler, next_obs=next_obs, seed=3)
        # 2^17 rows of 4 MiB do not fit in the memory of any machine.
        for t in range(2):
            replay.add(torch.full((1 << 20,), float(t)), 0.0, 0.0, False, False, torch.full((1 << 20,), t + 1.0))
        before = digest(replay)
        views = (None,) if next_obs == "stored" else (None, rl.NStep(2, 0.9), rl.Sequence(2**20), rl.Sequence(2**63))
        for view in views:
            with pytest.raises((MemoryError, RuntimeError)):
                replay.sample(2**17, view)
            assert digest(replay) == before
        with pytest.raises(MemoryError, match="none left"):
            replay.sample(2, Failing())
        replay.check()
        assert len(replay.sample(1)) == 1

    def test_a_refused_view_draws_nothing(self) -> None:
        replay = fill(6, next_obs="stored", sampler=rl.WithoutReplacement())
        seen = replay.sample(2)["index"].tolist()
        with pytest.raises(rl.SchemaError, match="expected rows in time order"):
            replay.sample(2, rl.NStep(2, 0.9))
        seen += replay.sample(4)["index"].tolist()
        assert sorted(seen) == list(range(6))

    def test_a_refused_block_of_stacks_leaves_older_rows_alone(self, backend: str) -> None:
        replay = rl.ReplayBuffer(4, obs=rl.Stacked(rl.Field(()), 2), action=())

        def block(frames: list[list[float]], following: list[list[float]]) -> dict[str, Any]:
            n = len(frames)
            flags = np.zeros(n, bool)
            return {"obs": np.array(frames), "next_obs": np.array(following), "action": np.zeros(n),
                    "reward": np.arange(float(n)), "terminated": flags, "truncated": flags}  # fmt: skip

        replay.extend(block([[t and t - 1, t] for t in range(6)], [[t, t + 1] for t in range(6)]))
        before = [row["obs"].tolist() for row in replay.episodes()]
        with pytest.raises(rl.SchemaError, match="a stack of"):
            replay.extend(block([[5, 6], [6, 7], [1, 1.5]], [[6, 7], [7, 8], [1.5, 9]]))
        assert [row["obs"].tolist() for row in replay.episodes()] == before

    def test_a_flag_of_a_row_that_only_resets_ends_nothing_in_a_block_of_stacks(self, backend: str) -> None:
        replay = rl.ReplayBuffer(8, obs=rl.Stacked(rl.Field(()), 2), action=(), autoreset="NEXT_STEP")
        # The second row only resets the environment, although it has a flag.
        ends = np.array([True, True, False])
        frames = {"obs": [[1, 1], [1, 2], [3, 3]], "next_obs": [[1, 2], [3, 3], [3, 4]]}
        arrays = {name: np.array(stacks, np.float32) for name, stacks in frames.items()}
        numbers = {"action": np.zeros(3), "reward": np.arange(3.0), "terminated": ends, "truncated": ends & False}
        replay.extend(arrays | numbers)
        assert replay.ids().tolist() == [0, 2]
        assert replay[[2]]["obs"].tolist() == [[3, 3]]

    def test_a_window_longer_than_the_buffer_is_what_there_is(self, backend: str) -> None:
        view = rl.NStep(2**70, 0.5)
        batch = fill(5).sample(8, view)
        assert list(batch.keys())[-2:] == ["index", "discount"]
        same = rl.Hindsight("obs", "obs", lambda at, goal, rows: (rows["reward"], rows["terminated"]), 0.0, view=view)
        relabelled = fill(5).sample(8, same)
        for found in (batch, relabelled):
            assert torch.equal(found["discount"], 0.5 ** (5.0 - found["obs"][:, 0]))
            assert (found["next_obs"] == 5.0).all()

    def test_the_default_dtype_of_torch_does_not_matter(self, backend: str) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            assert fill(9).sample(3, rl.NStep(2, 0.9))["discount"].dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)

    def test_more_leaves_than_the_native_core_writes_are_read(self) -> None:
        native = rl.kernels.native_core()
        extra = {f"extra{i}": () for i in range(native.MAX_LEAVES if native is not None else 1)}
        replay = rl.ReplayBuffer(8, obs=1, action=(), extra=extra, seed=0)
        for t in range(20):
            replay.add([t], 0.0, float(t), False, False, [t + 1], **dict.fromkeys(extra, 0.0))
        batch = replay.sample(16)
        assert torch.equal(batch["next_obs"][:, 0], batch["reward"] + 1)

    def test_switching_the_exchange_off_and_on_is_fine(self) -> None:
        with running("no_exchange"):
            replay = fill(9, sampler=rl.Prioritized())
            assert replay.sample(3, rl.Sequence(2))["index"].dtype == torch.int64
        replay.update_priority([0], [1.0])
        assert len(replay.sample(3)) == 3
        with running("no_exchange"):
            assert len(replay.sample(3, rl.NStep(2, 0.9))) == 3


class TestUpdating:
    def test_a_skipped_update_does_not_count(self, backend: str) -> None:
        replay = fill(5, capacity=3, sampler=rl.Prioritized(alpha=1.0, eps=0.0))
        assert replay.update_priority([0, 4], [1000.0, 2.0]) == 1
        replay.add([5.0], 0.0, 0.0, False, False, [6.0])
        tree, storage = replay.sampler.tree, replay.storage  # type: ignore[attr-defined]
        assert tree.get(storage.locate(torch.tensor([5]))).tolist() == [2.0]

    def test_zero_is_zero_and_positive_is_positive_for_every_alpha(self, backend: str) -> None:
        for alpha in (0.0, 1.0, 2.0):
            replay = fill(3, sampler=rl.Prioritized(alpha=alpha, eps=0.0))
            replay.update_priority([0, 1, 2], [0.0, 1e-200, 0.0])
            assert set(replay.sample(50)["index"].tolist()) == {1}
            replay.update_priority([1], [0.0])
            with pytest.raises(rl.NotReadyError, match="a row of positive priority"):
                replay.sample(1)

    def test_needs_a_sampler_with_priorities(self) -> None:
        with pytest.raises(rl.SchemaError, match="update_priority: expected a sampler with priorities"):
            fill(3).update_priority([0], [1.0])

    @pytest.mark.parametrize("priority", [[1.0], [[1.0, 2.0]], 1.0, torch.zeros(3)])
    def test_needs_a_priority_for_each_index(self, priority: Any) -> None:
        replay = fill(3, sampler=rl.Prioritized())
        with pytest.raises(rl.SchemaError, match=r"priority: expected shape \(2,\)"):
            replay.update_priority([0, 1], priority)

    def test_takes_nothing_as_nothing(self, backend: str) -> None:
        replay = fill(3, sampler=rl.Prioritized())
        assert replay.update_priority(torch.empty(0, dtype=torch.int64), torch.empty(0)) == 0

    @pytest.mark.parametrize(
        "wrong", [{"alpha": -1.0}, {"alpha": float("nan")}, {"beta": -0.1}, {"eps": float("inf")}, {"normalize": "x"}]
    )
    def test_settings_are_checked(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match=f"Prioritized.{next(iter(wrong))}: expected"):
            rl.Prioritized(**wrong)

    def test_a_new_row_has_the_largest_priority_so_far(self, backend: str) -> None:
        replay = fill(3, sampler=rl.Prioritized(alpha=1.0, eps=0.0))
        replay.update_priority([0, 1, 2], [1.0, 7.0, 2.0])
        replay.update_priority([1], [1.0])
        replay.add([3.0], 0.0, 0.0, False, False, [4.0])
        tree = replay.sampler.tree  # type: ignore[attr-defined]
        assert tree.get(torch.arange(4)).tolist() == [1.0, 1.0, 2.0, 7.0]

    @settings(max_examples=30, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), native=st.booleans())
    def test_only_transitions_have_a_priority(self, seed: int, native: bool) -> None:
        with rl.kernels.force_torch() if not native else pytest.MonkeyPatch.context():
            both = Both(5, 2, np.random.default_rng(seed), sampler=rl.Prioritized())
            both.play(10)
            storage, tree = both.replay.storage, both.replay.sampler.tree  # type: ignore[attr-defined]
            positive = (tree.leaves_view()[: storage.rows.ring.kind.numel()] > 0).nonzero().squeeze(1)
            assert set(storage.ids(positive).tolist()) == set(both.expected)


class TestWithoutReplacement:
    def test_an_epoch_has_every_row_once(self, backend: str) -> None:
        replay = fill(10, sampler=rl.WithoutReplacement())
        sizes = []
        for _ in range(3):
            epoch: list[int] = []
            while len(epoch) < 10:
                batch = replay.sample(4)
                sizes.append(len(batch))
                epoch += batch["index"].tolist()
            assert sorted(epoch) == list(range(10))
        assert sizes == [4, 4, 2] * 3

    def test_the_remainder_can_be_left_out(self, backend: str) -> None:
        replay = fill(10, sampler=rl.WithoutReplacement(drop_last=True))
        batches = [replay.sample(4)["index"].tolist() for _ in range(4)]
        assert all(len(batch) == 4 for batch in batches)
        assert len({*batches[0], *batches[1]}) == len({*batches[2], *batches[3]}) == 8

    def test_rows_that_were_overwritten_are_skipped(self, backend: str) -> None:
        replay = fill(8, capacity=8, sampler=rl.WithoutReplacement())
        seen = replay.sample(2)["index"].tolist()
        for t in range(8, 12):
            replay.add([float(t)], 0.0, 0.0, False, False, [t + 1.0])
        rest = replay.sample(8)["index"].tolist()
        assert sorted(rest) == [i for i in range(4, 8) if i not in seen]


class TestViews:
    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
    def test_settings_are_checked(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="NStep.n: expected a positive int"):
            rl.NStep(wrong, 0.9)
        with pytest.raises(rl.SchemaError, match="Sequence.length: expected a positive int"):
            rl.Sequence(wrong)
        if wrong != 0:
            with pytest.raises(rl.SchemaError, match="Sequence.burn_in: expected a non-negative int"):
                rl.Sequence(3, burn_in=wrong)

    @pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan"), "1", True])
    def test_a_discount_is_in_its_range(self, gamma: Any) -> None:
        with pytest.raises(rl.SchemaError, match="NStep.gamma: expected a number( from 0 to 1)?, got"):
            rl.NStep(3, gamma)

    def test_hindsight_settings_are_checked(self) -> None:
        def fn(a: torch.Tensor, g: torch.Tensor, rows: Any) -> Any:
            return rows["reward"], rows["terminated"]

        with pytest.raises(rl.SchemaError, match="Hindsight.ratio"):
            rl.Hindsight("goal", "at", fn, ratio=1.5)
        with pytest.raises(rl.SchemaError, match="Hindsight.strategy"):
            rl.Hindsight("goal", "at", fn, strategy="past")  # type: ignore[arg-type]
        with pytest.raises(
            rl.SchemaError, match=r"Hindsight: expected a leaf of the observation \(obs\), got obs.goal"
        ):
            fill(3).sample(2, rl.Hindsight("goal", "at", fn))
        column = rl.Hindsight(("obs",), ("obs",), lambda a, g, rows: (a, rows["terminated"]))
        with pytest.raises(
            rl.SchemaError, match=r"Hindsight.fn: reward: expected shape \(2,\) for 2 rows, got \(2, 1\)"
        ):
            fill(3).sample(2, column)
        with pytest.raises(rl.SchemaError, match="Sequence: expected one episode, got cross_episodes=True"):
            fill(3).sample(2, rl.Hindsight(("obs",), ("obs",), fn, view=rl.Sequence(2, cross_episodes=True)))

    def test_hindsight_around_a_sequence_gives_one_goal_to_the_whole_sequence(self, backend: str) -> None:
        replay = rl.ReplayBuffer(64, obs={"at": 1, "goal": 1}, action=(), seed=0)
        for t in range(20):
            replay.add({"at": [float(t)], "goal": [-1.0]}, 0.0, 0.0, False, t == 19, {"at": [t + 1.0], "goal": [-1.0]})
        view = rl.Hindsight("goal", "at", lambda a, g, rows: ((a == g).squeeze(-1).float(), (a == g).squeeze(-1)),
                            ratio=1.0, view=rl.Sequence(4, burn_in=2))  # fmt: skip
        batch = replay.sample(40, view)
        assert batch["obs", "goal"].shape == (40, 6, 1)
        for i in range(40):
            real = batch["mask"][i]
            goals = batch["obs", "goal"][i][real].unique()
            assert len(goals) == 1
            assert batch["obs", "at"][i][batch["train"][i]][0] == batch["index"][i]
            hit = (batch["next_obs", "at"][i] == goals).squeeze(-1) & real
            assert torch.equal(batch["reward"][i] == 1, hit)
        assert set(batch.keys()) >= {"mask", "train", "is_first", "index"}

    def test_hindsight_around_a_sequence_is_a_sequence(self, backend: str) -> None:
        replay = rl.ReplayBuffer(32, obs={"at": 1, "goal": 1}, action=(), extra={"hidden": rl.Carry(3)}, seed=0)
        for t in range(4):
            obs, following = {"at": [float(t)], "goal": [-1.0]}, {"at": [t + 1.0], "goal": [-1.0]}
            replay.add(obs, 0.0, 0.0, False, t == 3, following, hidden=np.full(3, t))
        view = rl.Hindsight(
            "goal", "at", lambda a, g, rows: (rows["reward"], rows["terminated"]), ratio=1.0, view=rl.Sequence(1)
        )
        assert set(replay.sample(2, view).keys()) >= {"is_first", "mask", "train"}
        view = rl.Hindsight("goal", "at", view.fn, ratio=1.0, view=rl.Sequence(3, burn_in=1))
        batch = replay.sample(20, view)
        assert batch["hidden"].shape == (20, 3)
        assert batch["mask"][:, 0].all()
        assert torch.equal(batch["hidden"][:, 0], batch["obs", "at"][:, 0, 0])
        assert not batch["obs", "goal"][~batch["mask"]].any()
        steps = rl.Hindsight("goal", "at", view.fn, view=rl.NStep(2, 0.9))
        out = replay.sample(4, steps)
        assert replay.sample(4, steps, out=out) is out

    def test_a_goal_is_like_what_can_be_achieved(self) -> None:
        replay = rl.ReplayBuffer(8, obs={"at": 1, "goal": 3}, action=())
        replay.add({"at": [0.0], "goal": [0.0] * 3}, 0.0, 0.0, False, False, {"at": [1.0], "goal": [0.0] * 3})
        with pytest.raises(rl.SchemaError, match="Hindsight: expected an achieved goal like Field"):
            replay.sample(1, rl.Hindsight("goal", "at", lambda a, g, rows: (a, g)))
        float_end = rl.Hindsight("at", "at", lambda a, g, rows: (rows["reward"], rows["reward"]))
        with pytest.raises(rl.SchemaError, match="Hindsight.fn: terminated: expected bool, got float32"):
            replay.sample(1, float_end)

        def only_reward(achieved: Any, goal: Any, rows: Any) -> Any:
            return rows["reward"]

        def of_numpy(achieved: Any, goal: Any, rows: Any) -> Any:
            return np.zeros(1), (goal == rows["obs", "at"]).squeeze(-1)

        with pytest.raises(rl.SchemaError, match=r"Hindsight.fn: expected \(reward, terminated\), got Tensor"):
            replay.sample(1, rl.Hindsight("at", "at", only_reward))
        kept = rl.Hindsight("at", "at", of_numpy, ratio=0.0)
        replay.sample(1, kept)

    def test_two_rows_between_episodes_are_both_passed_over(self, backend: str) -> None:
        replay = rl.ReplayBuffer(32, obs=1, action=(), num_envs=1, autoreset="NEXT_STEP")
        flags = np.zeros(1, bool)

        def add(obs: float, reward: float, end: bool, following: float) -> None:
            replay.add(
                np.array([[obs]]), np.zeros(1), np.array([reward]), np.array([end]), flags, np.array([[following]])
            )

        add(0.0, 0.0, True, 1.0)
        # This row only resets the environment.
        add(1.0, -1.0, False, 2.0)
        add(5.0, 5.0, False, 6.0)
        batch = replay.sample(30, rl.Sequence(2, burn_in=1, cross_episodes=True))
        assert batch["reward"][batch["index"] == 0][0].tolist() == [0.0, 5.0, 0.0]
        assert batch["train"][batch["index"] == 0][0].tolist() == [True, True, False]
        assert batch["reward"][batch["index"] == 3][0].tolist() == [0.0, 5.0, 0.0]
        assert batch["mask"][batch["index"] == 3][0].tolist() == [True, True, False]
        assert batch["train"][batch["index"] == 3][0].tolist() == [False, True, False]

    @pytest.mark.parametrize("cross", [False, True])
    def test_a_sequence_starts_with_a_real_step_and_its_carry(self, backend: str, cross: bool) -> None:
        replay = rl.ReplayBuffer(32, obs=1, action=(), extra={"hidden": rl.Carry((2, 3))}, seed=0)
        for t in range(9):
            replay.add([float(t)], 0.0, 0.0, t == 5, False, [t + 1.0], hidden=np.full((2, 3), t))
        batch = replay.read(replay.ids(), rl.Sequence(4, burn_in=3, cross_episodes=cross))
        assert batch["hidden"].shape == (9, 2, 3)
        assert batch["mask"][:, 0].all()
        assert torch.equal(batch["hidden"][:, 0, 0], batch["obs"][:, 0, 0])
        episodes = [list(range(9))] if cross else [list(range(6)), list(range(6, 9))]
        for episode in episodes:
            for place, t in enumerate(episode):
                steps, mask, train = around(episode[:place], episode[place:], 4, 3)
                assert batch["mask"][t].tolist() == mask
                assert batch["train"][t].tolist() == train
                assert batch["obs"][t, :, 0].tolist() == [step or 0.0 for step in steps]
                drawn = train.index(True)
                assert batch["obs"][t, drawn, 0] == int(batch["index"][t]) - (t > 5)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


SYNCHRONISING = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal.default")


class TestOtherDevices:
    def test_arrays_and_numbers_of_the_host_are_taken(self) -> None:
        replay = rl.ReplayBuffer(64, obs=2, action=(), num_envs=4, device="meta")
        flags = np.zeros(4, bool)
        replay.add(np.zeros((4, 2)), np.zeros(4), [0.0] * 4, flags, flags, np.ones((4, 2)))
        single = rl.ReplayBuffer(8, obs=1, action=(), device="meta")
        with pytest.raises(rl.NotReadyError):
            single.sample(1)
        single.add([0.0], 0.5, 1.0, False, True, [1.0])

    def test_stacks_are_rebuilt_there_too(self) -> None:
        replay = rl.ReplayBuffer(16, rl.Stacked(rl.Field(2), 3), (), num_envs=2, device="meta")
        flags = np.zeros(2, bool)
        replay.add(np.zeros((2, 2, 3)), np.zeros(2), np.zeros(2), flags, flags, np.ones((2, 2, 3)))
        batch = _read_there(replay)
        assert batch[("obs",)].shape == (4, 2, 3)

    @pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized()])
    def test_sampling_does_not_synchronise(self, sampler: Any) -> None:
        with rl.kernels.force_torch():
            replay = rl.ReplayBuffer(64, obs=2, action=(), num_envs=4, sampler=sampler, seed=0)
            flags = np.zeros(4, bool)
            for t in range(10):
                replay.add(np.full((4, 2), t), np.zeros(4), np.zeros(4), flags, flags, np.full((4, 2), t + 1.0))
            storage, slots = replay.storage, torch.arange(8)
            with Count() as count:
                drawn = storage.draw(8, replay._random) if isinstance(sampler, rl.Uniform) else slots
                storage.make_reader(rl.Transition().plan(storage.schema)).read(drawn)
                storage.ids(drawn)
        assert not [call for call in count.calls if any(name in call for name in SYNCHRONISING)]


def _read_there(replay: rl.ReplayBuffer) -> Any:
    slots = torch.zeros(4, dtype=torch.int64, device="meta")
    return replay.storage.make_reader(rl.Transition().plan(replay.storage.schema)).read(slots)


class TestRows:
    def test_ids_name_every_transition_oldest_first(self, backend: str) -> None:
        both = Both(6, 3, np.random.default_rng(0))
        for _ in range(20):
            both.add()
        index = both.replay.ids()
        assert len(index) == len(both.replay)
        assert (index.diff() > 0).all()
        whole = torch.cat([episode["index"] for episode in both.replay.episodes()])
        assert torch.equal(whole.sort().values, index)
        assert len(fill(0).ids()) == 0

    def test_rows_are_read_through_any_view(self, backend: str) -> None:
        replay = fill(8)
        batch = replay.read(replay.ids()[[2, 6]], rl.NStep(3, 0.5))
        assert batch["reward"].tolist() == [20 + 15 + 10, 60 + 35]
        assert batch["next_obs"].squeeze(1).tolist() == [5, 8]
        assert batch["index"].tolist() == replay.ids()[[2, 6]].tolist()
        with pytest.raises(rl.SchemaError, match=r"got the class NStep. Pass an instance: NStep\(…\)\."):
            replay.read(replay.ids(), rl.NStep)  # pyright: ignore[reportArgumentType]

    def test_a_buffer_knows_which_environments_are_inside_an_episode(self, backend: str) -> None:
        replay = rl.ReplayBuffer(18, obs=1, action=(), num_envs=3)
        assert replay.is_open.tolist() == [False] * 3
        obs, flags = np.zeros((3, 1), np.float32), np.array([False, True, False])
        replay.add(obs, np.zeros(3), np.zeros(3), flags, np.zeros(3, np.bool_), obs + 1)
        assert replay.is_open.tolist() == [True, False, True]
        replay.cut([2])
        assert replay.is_open.tolist() == [True, False, False]


class Failing:
    """A view of a user that fails after the draw."""

    def plan(self, schema: Any) -> Any:
        return rl.Transition().plan(schema)

    def finish(self, batch: Any, context: Any) -> Any:
        context.random.uniform(3, context.slots.device)
        raise MemoryError("none left")


class TestState:
    def test_staged_fields_are_part_of_the_state(self) -> None:
        replay, twin = fill(3), fill(0)
        replay.stage(obs=[3.0])
        twin.load_state_dict(replay.state_dict())
        twin.add(None, 0.0, 30.0, False, False, [4.0])
        assert twin[twin.ids()[-1:]]["obs"].item() == 3.0

    def test_the_state_of_another_buffer_is_refused_and_changes_nothing(self) -> None:
        replay = fill(3)
        with pytest.raises(rl.SchemaError, match="load_state_dict: capacity: expected 16, got 8"):
            replay.load_state_dict(fill(5, capacity=8).state_dict())
        with pytest.raises(
            rl.SchemaError, match=r"load_state_dict: sampler: expected the state of Uniform\(\), got \['draws'"
        ):
            replay.load_state_dict(fill(5, sampler=rl.Prioritized()).state_dict())
        assert replay[replay.ids()]["reward"].tolist() == [0, 10, 20]
