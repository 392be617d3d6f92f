"""The rollout buffer: every stored step is read back once, at its index."""

from __future__ import annotations

import os
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import relive as rl
from tests.rollout.steps import N, make, step


class TestStoring:
    def test_every_field_is_where_it_was_put(self, backend: str) -> None:
        rollout = make()
        data = rollout.data
        assert data.batch_size == torch.Size([4, N])
        assert data["obs"][:, :, 0].tolist() == [[t] * N for t in range(4)]
        assert data["action"].tolist() == [[t] * N for t in range(4)]
        assert data["action"].dtype == torch.int64
        assert data["reward"].tolist() == [[10 * t + n for n in range(N)] for t in range(4)]
        assert data["value"].tolist() == [[10 * t] * N for t in range(4)]
        assert data["log_prob"].tolist() == [[-t] * N for t in range(4)]
        assert data["mask"].all()
        assert len(rollout) == 4 * N
        assert rollout.num_stored == 4
        assert rollout.is_full

    def test_data_shares_the_buffers_memory(self) -> None:
        rollout = make()
        rollout.data["obs"][1] = 7
        assert rollout["obs"][1].tolist() == [[7, 7]] * N

    def test_a_full_buffer_refuses_another_step(self) -> None:
        rollout = make()
        with pytest.raises(rl.BufferFullError, match=r"add: expected at most 4 steps, got 5\. Train on"):
            rollout.add(**step(5))
        with pytest.raises(rl.BufferFullError):
            rollout.stage(obs=np.zeros((N, 2)))
        assert len(rollout) == 4 * N

    def test_value_and_log_prob_are_zero_in_the_memory_when_not_given_never_stale(self, backend: str) -> None:
        rollout = make()
        rollout.clear()
        rollout.add(**step(1, value=None, log_prob=None))
        assert not rollout.columns["value"][0].any()
        assert not rollout.columns["log_prob"][0].any()

    @pytest.mark.parametrize("name", ["obs", "action", "reward", "terminated", "truncated"])
    def test_a_missing_field_is_named(self, backend: str, name: str) -> None:
        with pytest.raises(rl.SchemaError, match=f"^{name}: expected a value, got None"):
            make(count=0).add(**{**step(0), name: None})

    def test_an_unknown_field_is_named_with_the_known_ones(self) -> None:
        rollout = make(count=0, extra={"hint": 1})
        with pytest.raises(rl.SchemaError, match=r"^hont: expected a declared field \(obs, action, .*hint\)"):
            rollout.add(**step(0), hont=np.zeros((N, 1)))
        with pytest.raises(rl.SchemaError, match="^hint: expected a value, got None"):
            rollout.add(**step(0))

    def test_log_prob_can_be_declared_otherwise(self) -> None:
        rollout = rl.RolloutBuffer(1, N, obs=2, action=2, reward=(2,), extra={"log_prob": ()})
        flags = np.zeros(N, bool)
        rollout.add(np.zeros((N, 2)), np.zeros((N, 2)), np.zeros((N, 2)), flags, flags, log_prob=np.ones(N))
        assert rollout["log_prob"].tolist() == [[1.0] * N]

    def test_one_environment_has_no_environment_axis(self, backend: str) -> None:
        rollout = rl.RolloutBuffer(3, None, obs=2, action=gym.spaces.Discrete(4))
        for t in range(3):
            rollout.add(np.full(2, t), t, float(t), t == 2, False, value=torch.tensor(0.5), log_prob=-1)
        assert rollout.data.batch_size == torch.Size([3])
        assert rollout["reward"].tolist() == [0.0, 1.0, 2.0]
        rollout.compute_advantage(0.0, gamma=1.0, lam=1.0)
        assert rollout["return"].tolist() == [3.0, 3.0, 2.0]
        rollout.attach(tag=torch.arange(3))
        batch = next(rollout.minibatches(3, shuffle=False))
        assert batch["index"].tolist() == [0, 1, 2]
        assert batch["obs"].shape == (3, 2)
        assert batch["tag"].tolist() == [0, 1, 2]
        assert rollout.env_major().batch_size == torch.Size([1, 4])

    def test_a_reward_that_is_no_number_is_refused(self) -> None:
        for wrong, where in ((rl.Field((), torch.int64), "reward"), ({"a": rl.Field((), torch.bool)}, "reward.a")):
            with pytest.raises(rl.SchemaError, match=f"^{where}: expected a floating-point field"):
                rl.RolloutBuffer(2, 2, obs=1, action=1, reward=wrong)


class TestReading:
    def test_a_field_by_name_or_path(self) -> None:
        rollout = make(count=0, extra={"e": {"a": ()}})
        rollout.add(**step(0), e={"a": np.ones(N)})
        assert rollout["e", "a"].tolist() == [[1.0] * N]
        assert rollout["e"]["a"].tolist() == [[1.0] * N]
        with pytest.raises(KeyError, match="expected one of .*action"):
            rollout["actions"]

    @pytest.mark.parametrize("num_envs", [N, None])
    def test_the_whole_memory_is_there_from_the_start(self, num_envs: int | None) -> None:
        rollout = rl.RolloutBuffer(4, num_envs, obs={"a": 2}, action=())
        lead = (4,) if num_envs is None else (4, num_envs)
        assert rollout.columns["obs", "a"].shape == (*lead, 2)
        assert rollout.columns.batch_size == lead
        fields = {"obs": {"a": np.ones((*lead[1:], 2))}, **dict.fromkeys(("action", "reward"), np.ones(lead[1:]))}
        flags = dict.fromkeys(("terminated", "truncated"), np.zeros(lead[1:], bool))
        rollout.add(**fields, **flags)
        rollout.attach(mine=np.full((1, *lead[1:]), 3.0))
        columns = rollout.columns
        assert columns["reward"].sum() == (num_envs or 1)
        assert columns["mine"].flatten().tolist() == [3.0] * (num_envs or 1) + [0.0] * 3 * (num_envs or 1)
        columns["obs", "a"][0] = 7
        assert rollout["obs", "a"].eq(7).all()

    def test_repr_says_what_is_in_it(self) -> None:
        assert repr(make(count=2)).startswith("RolloutBuffer(2 of 4 steps, num_envs=3, fields=(obs, action,")


class TestForEnv:
    def test_takes_everything_from_a_vector_environment(self) -> None:
        envs = gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")
        rollout = rl.RolloutBuffer.for_env(envs, 5, value=(2,))
        assert rollout.num_envs == 3
        assert rollout.autoreset is AutoresetMode.NEXT_STEP

    def test_a_single_environment_is_reset_by_its_user(self) -> None:
        rollout = rl.RolloutBuffer.for_env(gym.make("CartPole-v1"), 5)
        assert rollout.num_envs is None
        assert rollout.autoreset is AutoresetMode.DISABLED

    def test_an_autoreset_wrapper_is_seen(self) -> None:
        env = gym.wrappers.Autoreset(gym.make("CartPole-v1"))
        assert rl.RolloutBuffer.for_env(env, 5).autoreset is AutoresetMode.NEXT_STEP

    def test_a_vector_environment_without_the_metadata_must_be_told(self) -> None:
        envs = gym.make_vec("CartPole-v1", 3)
        envs.metadata = {}
        with pytest.raises(rl.SchemaError, match="Pass autoreset="):
            rl.RolloutBuffer.for_env(envs, 5)
        assert rl.RolloutBuffer.for_env(envs, 5, autoreset="SAME_STEP").autoreset is AutoresetMode.SAME_STEP

    def test_add_step_without_a_mode_names_the_argument(self) -> None:
        with pytest.raises(rl.SchemaError, match="autoreset: .*Pass autoreset= to the buffer"):
            make(count=0).add_step(None, None, (None, None, None, None, {}))

    @pytest.mark.parametrize("wrong", [(1, 2, 3, 4), [1, 2, 3, 4, {}], None, 5])
    def test_add_step_wants_the_five_tuple(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="step: expected the 5-tuple of env.step"):
            make(count=0, autoreset="DISABLED").add_step(None, None, wrong)

    def test_an_unknown_mode_is_refused(self) -> None:
        with pytest.raises(rl.SchemaError, match="autoreset: expected one of AutoresetMode.NEXT_STEP"):
            make(autoreset="sometimes")

    def test_final_obs_has_no_meaning_under_next_step(self) -> None:
        with pytest.raises(rl.SchemaError, match="final_obs: expected None under autoreset=NEXT_STEP"):
            make(count=0, autoreset="NEXT_STEP").add(**step(0), final_obs=np.zeros((N, 2)))

    def test_steps_that_continue_do_not_warn(self) -> None:
        rollout = make(30, count=0, autoreset="DISABLED")
        for t in range(30):
            fields, next_obs = step(t), step(t + 1)["obs"]
            ends = fields["terminated"], fields["truncated"]
            rollout.add_step(fields["obs"], fields["action"], (next_obs, fields["reward"], *ends, {}))
        assert rollout["obs"][:, 0, 0].tolist() == list(range(30))


class TestOtherDevices:
    def test_a_tensor_of_another_device_is_refused(self) -> None:
        rollout = rl.RolloutBuffer(3, N, obs=2, action=(), device="meta")
        with pytest.raises(rl.SchemaError, match="obs: expected a tensor on meta, got cpu"):
            rollout.add(**{name: torch.as_tensor(value) for name, value in step(0).items()})


class TestInferenceMode:
    def test_a_buffer_made_and_filled_in_it_goes_on_outside(self, backend: str) -> None:
        with torch.inference_mode():
            rollout = make(count=4, autoreset="NEXT_STEP", stats=rl.EpisodeStats(N))
        rollout.clear()
        rollout.add(**step(1))
        assert rollout["obs"][:, 0, 0].tolist() == [1.0]


class TestThreadsAndProcesses:
    def test_threads_may_add_at_the_same_time(self) -> None:
        rollout = make(400, count=0)
        threads = [threading.Thread(target=lambda: [rollout.add(**step(7)) for _ in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rollout.is_full
        assert torch.equal(rollout["obs"], torch.full((400, N, 2), 7.0))

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
    # Python warns of forks of a process with threads, which this test needs.
    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_forked_child_is_told_not_to_use_it(self) -> None:
        rollout = make(count=1)
        child = os.fork()
        if child == 0:
            try:
                rollout.add(**step(1))
            except RuntimeError as error:
                os._exit(7 if "forked child" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        rollout.add(**step(1))


class TestStatistics:
    def full(self, stats: rl.EpisodeStats) -> None:
        """Set the number of counted steps to its maximum, so that counting another step raises."""
        stats.restore(stats.snapshot() | {"counts": torch.tensor([0, 2**53])})

    def test_failing_statistics_leave_the_last_slot_unchanged(self, backend: str) -> None:
        stats = rl.EpisodeStats(N)
        rollout = make(count=0, stats=stats)
        rollout.add(**step(0))
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        before = rollout.env_major().clone()
        self.full(stats)
        with pytest.raises(OverflowError, match="at most 2"):
            rollout.add(**step(7))
        assert (rollout.env_major() == before).all()

    def test_failing_statistics_leave_staged_fields(self, backend: str) -> None:
        stats = rl.EpisodeStats(N)
        rollout = make(count=0, stats=stats)
        rollout.add(**step(0))
        rollout.compute_advantage(np.full(N, 5.0))
        rest = step(7)
        rollout.stage(obs=rest.pop("obs"))
        self.full(stats)
        with pytest.raises(OverflowError, match="at most 2"):
            rollout.add(**rest)
        stats.clear()
        rollout.add(**rest)
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 7.0]

    def test_norms_count_hidden_states_at_every_step(self, backend: str) -> None:
        stats, norm = rl.EpisodeStats(N, metrics=("energy",)), rl.RunningNorm(2)
        extra = {"hidden": rl.Carry(2), "energy": rl.Carry()}
        rollout = make(count=0, stats=stats, norm={"hidden": norm}, extra=extra)
        for t in range(4):
            ended = np.full(N, t == 3)
            rollout.add(**step(t, terminated=ended), hidden=np.full((N, 2), t), energy=np.full(N, 10.0**t))
        assert stats.episodes()["energy"].tolist() == [1111.0] * N
        assert (norm.count, norm.mean.tolist()) == (4 * N, [1.5, 1.5])


def test_nbytes_counts_fields_and_attached_tensors() -> None:
    rollout = rl.RolloutBuffer(num_steps=4, num_envs=3, obs=2, action=())
    # The 5 rows of 3 environments hold obs, action, reward, two flags, value and log_prob.
    row_bytes = 5 * 3 * (8 + 4 + 4 + 1 + 1 + 4 + 4)
    assert rollout.nbytes == row_bytes
    rollout.add(np.zeros((3, 2)), np.zeros(3), np.zeros(3), np.zeros(3, bool), np.zeros(3, bool), value=np.zeros(3))
    rollout.compute_advantage(np.zeros(3))
    assert rollout.nbytes == row_bytes + 2 * 5 * 3 * 4


def test_a_referenced_leaf_of_a_freed_batch_stays_unchanged() -> None:
    """Later batches reuse the memory of freed batches, but not of leaves that are still referenced."""
    rollout = rl.RolloutBuffer(num_steps=64, num_envs=64, obs=64, action=(), seed=0)
    for t in range(64):
        row = torch.arange(64.0) + 64 * t
        rollout.add(row.unsqueeze(1).expand(64, 64), row, row, row < 0, row < 0)
    batches = enumerate(rollout.minibatches(1024, epochs=4))
    references = [(batch["obs"], batch["index"].clone()) for i, batch in batches if i % 3]
    assert len(references) == 10
    for obs, index in references:
        torch.testing.assert_close(obs, index.float().unsqueeze(1).expand(-1, 64))
