"""EmbodiChain's buffers on our core: documented code, golden numbers and our corrections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from relive.compat import embodichain
from relive.compat.embodichain import (
    RolloutBuffer,
    StepRolloutBuffer,
    compute_gae,
    compute_group_advantage,
    iterate_minibatches,
    transition_view,
)
from tests.compat.documents import blocks
from tests.reference import estimators as reference

CPU = torch.device("cpu")
T, N = 4, 3


class Collector:
    """Collector of steps with obs = t, action = t, reward = 10·t + n, value = 100·t."""

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        envs = torch.arange(rollout.batch_size[0])
        for t in range(num_steps + 1):
            rollout["obs"][:, t] = t
            rollout["value"][:, t] = 100 * t
        for t in range(num_steps):
            rollout["action"][:, t] = t
            rollout["sample_log_prob"][:, t] = -t
            rollout["reward"][:, t] = 10 * t + envs
            for name in ("done", "terminated", "truncated"):
                rollout[name][:, t] = False
        return rollout


def make_buffer(num_envs: int = N, rollout_len: int = T, **more: int) -> RolloutBuffer:
    return RolloutBuffer(num_envs, rollout_len, 2, 1, CPU, **more)


def collect_rollout(**options: Any) -> tuple[RolloutBuffer, TensorDict]:
    buffer = make_buffer(**options)
    rollout = Collector().collect(buffer.rollout_len, buffer.start_rollout())
    return buffer, rollout


def make_filled_step_buffer(steps: int = T, num_steps: int = T, **options: Any) -> StepRolloutBuffer:
    """Make a step buffer with the steps of `Collector`."""
    buffer = StepRolloutBuffer(num_steps, N, 2, 1, CPU, **options)
    for t in range(steps):
        buffer.add(**make_step(t))
    return buffer


def make_step(t: int, **changed: Any) -> dict[str, Any]:
    fields = {
        "obs": torch.full((N, 2), float(t)),
        "action": torch.full((N, 1), float(t)),
        "reward": 10.0 * t + torch.arange(N),
        "done": torch.zeros(N, dtype=torch.bool),
        "value": torch.full((N,), 100.0 * t),
        "logprob": torch.full((N,), -float(t)),
    }
    return {**fields, **changed}


class TestDocuments:
    def test_the_steps_document_runs(self) -> None:
        names: dict[str, Any] = {
            "RolloutBuffer": StepRolloutBuffer,
            **{"num_steps": T, "num_envs": N, "obs_dim": 2, "action_dim": 1, "device": CPU, "batch_size": 5},
            **make_step(1),
            **{"adv": torch.arange(T * N).view(T, N), "ret": torch.ones(T, N)},
        }
        usage, _ = blocks("embodichain_steps")
        exec(usage, names)
        assert names["buffer"].step == T
        assert set(names["batch"]) == {
            *("obs", "actions", "rewards", "dones", "values", "logprobs", "advantages", "returns")
        }
        assert names["batch"]["obs"].shape == (T * N % 5, 2)

    def test_the_shared_document_runs(self) -> None:
        names: dict[str, Any] = {
            **vars(embodichain),
            **{"num_envs": N, "rollout_len": T, "obs_dim": 2, "action_dim": 1, "device": CPU, "batch_size": 5},
            "collector": Collector(),
        }
        usage, _ = blocks("embodichain_shared")
        exec(usage, names)
        assert names["flat_rollout"].batch_size == torch.Size([N * T])
        assert names["flat_rollout"]["reward"].tolist() == [10 * t + n for n in range(N) for t in range(T)]
        assert names["batch"].batch_size == torch.Size([N * T % 5])


class TestGoldenNumbers:
    def test_gae_ends_with_the_step_that_was_done(self, backend: str) -> None:
        buffer = make_buffer(1, 3)
        rollout = buffer.start_rollout()
        rollout["reward"][:, :3] = 1
        rollout["value"][:] = torch.tensor([0.0, 0.0, 10.0, 5.0])
        rollout["done"][0, 1] = True
        _, returns = compute_gae(rollout, 1.0, 1.0)
        assert returns.tolist() == [[2.0, 1.0, 6.0]]
        assert rollout["return"].tolist() == [[2.0, 1.0, 6.0, 0.0]]
        assert rollout["advantage"].tolist() == [[2.0, 1.0, -4.0, 0.0]]

    def test_group_fields(self, backend: str) -> None:
        rollout = make_buffer(2, 3).start_rollout()
        rollout["reward"][:, :3] = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 2.0]])
        rollout["done"][0, 1] = True
        results = compute_group_advantage(rollout, 0.9, 2)
        expected = {
            "advantage": [[-1.0, -1.0, 0.0], [1.0, 1.0, 0.0]],
            "seq_mask": [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]],
            "seq_return": [[1.9, 1.0, 1.0], [2.62, 1.8, 2.0]],
        }
        for (name, numbers), result in zip(expected.items(), results, strict=True):
            torch.testing.assert_close(result, torch.tensor(numbers))
            assert torch.equal(rollout[name][:, :-1], result)
            assert rollout[name].shape == (2, 4)
            assert not rollout[name][:, -1].any()
            assert name in transition_view(rollout).keys()

    @pytest.mark.parametrize(("size", "text"), [(1, "at least 2"), (2, "a divisor of 3 environments")])
    def test_groups_must_be_whole(self, size: int, text: str) -> None:
        _, rollout = collect_rollout()
        with pytest.raises(ValueError, match=text):
            compute_group_advantage(rollout, 0.9, size)


@st.composite
def draw_rollout(draw: st.DrawFn, env_counts: tuple[int, ...] = (1, 2, 3)) -> TensorDict:
    """Draw a rollout of random numbers and ends; half of the rollouts have "final_value"."""
    envs, steps = draw(st.sampled_from(env_counts)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rollout = make_buffer(envs, steps).start_rollout()
    for name in ("reward", "value"):
        rollout[name][:] = torch.randn(envs, steps + 1, generator=generator)
    ends = [torch.rand(envs, steps + 1, generator=generator) < 0.3 for _ in range(2)]
    rollout["terminated"][:], rollout["truncated"][:] = ends
    rollout["done"][:] = ends[0] | ends[1]
    if draw(st.booleans()):
        rollout["final_value"] = torch.randn(envs, steps + 1, generator=generator)
    return rollout


class TestTargets:
    @settings(deadline=None)
    @given(rollout=draw_rollout(), gamma=st.sampled_from([0.5, 0.99, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
    def test_gae_is_the_written_out_recurrence(self, rollout: TensorDict, gamma: float, lam: float) -> None:
        view = transition_view(rollout)
        tensors: dict[str, torch.Tensor | None] = {"mask": None}
        for name in ("reward", "value", "terminated", "truncated", "next_value"):
            tensors[name] = view[name].T
        expected = reference.by_column(reference.gae, tensors, gamma=gamma, lam=lam)
        for result, column in zip(compute_gae(rollout, gamma, lam), expected, strict=True):
            torch.testing.assert_close(result.double(), column.T, atol=1e-5, rtol=1e-5)

    @settings(deadline=None)
    @given(rollout=draw_rollout(env_counts=(2, 4)), first=st.booleans())
    def test_groups_are_the_written_out_formula(self, rollout: TensorDict, first: bool) -> None:
        reward, done = rollout["reward"][:, :-1].T, rollout["done"][:, :-1].T
        options = {"group_size": 2, "gamma": 0.9, "first_episode_only": first, "eps": 1e-8}
        seq_return, seq_mask, advantage = reference.group_advantage(reward, done, mask=torch.ones_like(done), **options)
        results = compute_group_advantage(rollout, 0.9, 2, truncate_at_first_done=first)
        for result, expected in zip(results, (advantage, seq_mask, seq_return), strict=True):
            torch.testing.assert_close(result.double(), expected.double().T, atol=1e-4, rtol=1e-4)

    def test_a_truncated_step_bootstraps_from_its_final_value(self) -> None:
        """EmbodiChain resets in the same step, so the next value belongs to the next episode."""
        _, rollout = collect_rollout(num_envs=1)
        rollout["value"][:] = torch.tensor([1.0, 2.0, 1000.0, 4.0, 5.0])
        rollout["reward"][:, :-1] = 0
        rollout["truncated"][0, 1] = rollout["done"][0, 1] = True
        rollout["final_value"] = torch.full((1, T + 1), 7.0)
        _, returns = compute_gae(rollout, 0.5, 1.0)
        assert returns.tolist() == [[1.75, 3.5, 1.25, 2.5]]
        assert transition_view(rollout)["next_value"].tolist() == [[2.0, 7.0, 4.0, 5.0]]

    def test_without_one_it_bootstraps_from_the_state_that_was_truncated(self) -> None:
        _, rollout = collect_rollout(num_envs=1)
        rollout["value"][:] = torch.tensor([1.0, 2.0, 1000.0, 4.0, 5.0])
        rollout["reward"][:, :-1] = 0
        rollout["truncated"][0, 1] = rollout["done"][0, 1] = True
        _, returns = compute_gae(rollout, 0.5, 1.0)
        assert returns.tolist() == [[0.5, 1.0, 1.25, 2.5]]

    def test_a_step_that_is_both_counts_as_terminated(self) -> None:
        _, rollout = collect_rollout(num_envs=1)
        rollout["reward"][:, :-1] = 1
        for name in ("truncated", "terminated", "done"):
            rollout[name][0, 1] = True
        _, returns = compute_gae(rollout, 1.0, 1.0)
        assert returns[0, :2].tolist() == [2.0, 1.0]

    @pytest.mark.parametrize("name", ["reward", "value"])
    def test_other_shapes_are_refused(self, name: str) -> None:
        _, rollout = collect_rollout()
        rollout[name] = rollout[name].unsqueeze(-1)
        with pytest.raises(ValueError, match=f"^{name}: expected shape"):
            compute_gae(rollout, 0.99, 0.95)
        assert "advantage" not in rollout.keys()


class TestSharedRollout:
    def test_it_is_one_object_on_contiguous_memory(self) -> None:
        buffer, rollout = collect_rollout()
        fields = {
            "obs": (torch.float32, (N, T + 1, 2)),
            "action": (torch.float32, (N, T + 1, 1)),
            **dict.fromkeys(("sample_log_prob", "value", "reward"), (torch.float32, (N, T + 1))),
            **dict.fromkeys(("done", "terminated", "truncated"), (torch.bool, (N, T + 1))),
        }
        assert {name: (field.dtype, tuple(field.shape)) for name, field in rollout.items()} == fields
        assert rollout.batch_size == torch.Size([N, T + 1])
        assert rollout.device == CPU
        assert all(field.is_contiguous() for field in rollout.values())
        assert rollout["obs"].view(-1, 2).data_ptr() == rollout["obs"].data_ptr()
        buffer.add(rollout)
        assert buffer.get(flatten=False) is rollout is buffer.buffer is buffer.start_rollout()
        assert (buffer.num_envs, buffer.rollout_len, buffer.obs_dim, buffer.action_dim) == (N, T, 2, 1)
        assert buffer.device == CPU

    def test_the_core_has_what_was_written(self) -> None:
        buffer, rollout = collect_rollout()
        buffer.add(rollout)
        core = buffer.core
        assert core["reward"].tolist() == [[10 * t + n for n in range(N)] for t in range(T)]
        assert core.env_major()["value"][:, -1].tolist() == [100.0 * T] * N
        assert len(core) == T * N

    def test_it_goes_from_empty_to_full_and_back(self) -> None:
        buffer, rollout = collect_rollout()
        assert not buffer.is_full()
        with pytest.raises(RuntimeError, match="get: expected a rollout"):
            buffer.get()
        buffer.add(rollout)
        assert buffer.is_full()
        with pytest.raises(RuntimeError, match="start_rollout: expected an empty buffer"):
            buffer.start_rollout()
        assert buffer.get(flatten=True).batch_size == torch.Size([N * T])
        assert not buffer.is_full()
        with pytest.raises(RuntimeError, match="get: expected a rollout"):
            buffer.get()

    def test_only_its_own_rollout_of_its_own_layout_is_taken(self) -> None:
        buffer, rollout = collect_rollout()
        with pytest.raises(ValueError, match=r"expected the TensorDict that start_rollout\(\) returned"):
            buffer.add(rollout.clone())
        reward = rollout["reward"]
        rollout["reward"] = reward.unsqueeze(-1)
        text = r"^Rollout field 'reward' shape mismatch: expected \(3, 5\), got \(3, 5, 1\)\.$"
        with pytest.raises(ValueError, match=text):
            buffer.add(rollout)
        rollout["reward"] = reward.double()
        with pytest.raises(ValueError, match=r"^Rollout field 'reward' dtype mismatch: expected torch\.float32, got"):
            buffer.add(rollout)
        rollout["reward"] = reward
        rollout.batch_size = torch.Size([N])
        with pytest.raises(ValueError, match=r"^rollout: expected batch size \(3, 5\), got \(3,\)"):
            buffer.add(rollout)
        assert not buffer.is_full()

    def test_a_field_set_anew_becomes_shared_again(self) -> None:
        buffer, rollout = collect_rollout()
        rollout["reward"] = torch.arange(N * (T + 1.0)).view(N, T + 1)
        buffer.add(rollout)
        assert buffer.core["reward"][1].tolist() == [1.0, 6.0, 11.0]
        rollout["reward"][0, 1] = 77
        assert buffer.core["reward"][1, 0] == 77
        buffer.get(flatten=False)["reward"] = torch.zeros(N, T + 1)
        buffer.start_rollout()["reward"][2, 3] = 55
        assert buffer.core.lend()["reward"][2, 3] == 55

    def test_a_new_rollout_has_no_fields_of_algorithms_and_a_padded_slot(self) -> None:
        buffer, rollout = collect_rollout(critic_obs_dim=2, distribution_param_dim=1)
        for field in rollout.values():
            field[:, -1] = 1
        compute_gae(rollout, 0.99, 0.95)
        rollout["my_own"] = torch.ones(N, T + 1)
        buffer.add(rollout)
        buffer.get(flatten=False)
        again = buffer.start_rollout()
        kept = {"obs", "critic_obs", "value"}
        padded = {
            *("action", "sample_log_prob", "reward", "done", "terminated", "truncated", "action_mean", "action_std")
        }
        assert set(again.keys()) == kept | padded
        assert all(again[name][:, -1].all() for name in kept)
        assert not any(again[name][:, -1].any() for name in padded)


class TestTransitions:
    def test_the_padded_slot_is_dropped_and_every_field_comes_along(self) -> None:
        _, rollout = collect_rollout()
        rollout["my_own"] = torch.arange(N * (T + 1)).view(N, T + 1)
        view = transition_view(rollout)
        assert view.batch_size == torch.Size([N, T])
        assert set(view.keys()) == {*rollout.keys(), "next_value"}
        assert view["next_value"].tolist() == [[100.0 * (t + 1) for t in range(T)]] * N
        assert view["my_own"].tolist() == [[n * (T + 1) + t for t in range(T)] for n in range(N)]
        view["reward"][1, 2] = 77
        assert rollout["reward"][1, 2] == 77

    def test_flat_ones_go_through_one_environment_after_the_other_and_are_the_callers(self) -> None:
        buffer, rollout = collect_rollout()
        buffer.add(rollout)
        flat = buffer.get()
        assert flat["reward"].tolist() == [10 * t + n for n in range(N) for t in range(T)]
        flat["reward"][:] = 0
        assert rollout["reward"][2, 3] == 32

    def test_batches_are_every_row_once(self) -> None:
        _, rollout = collect_rollout()
        flat = transition_view(rollout, flatten=True)
        seen = list(iterate_minibatches(flat, 5, CPU))
        assert [len(batch) for batch in seen] == [5, 5, 2]
        assert sorted(torch.cat([batch["reward"] for batch in seen]).tolist()) == sorted(flat["reward"].tolist())
        assert all(torch.equal(batch["obs"][:, 0], batch["reward"] // 10) for batch in seen)

    def test_batches_are_moved_to_the_device(self) -> None:
        _, rollout = collect_rollout()
        batch = next(iterate_minibatches(transition_view(rollout, flatten=True), 5, torch.device("meta")))
        assert batch["obs"].device.type == "meta"

    @pytest.mark.parametrize("wrong", [0, -1, 1.5])
    def test_sizes_are_checked_at_the_call(self, wrong: Any) -> None:
        _, rollout = collect_rollout()
        with pytest.raises(ValueError, match="^batch_size: expected a positive int"):
            iterate_minibatches(transition_view(rollout, flatten=True), wrong, CPU)


class TestSteps:
    def test_the_attributes_are_the_memory(self) -> None:
        buffer = make_filled_step_buffer()
        assert buffer.obs[:, :, 0].tolist() == [[t] * N for t in range(T)]
        assert buffer.actions.shape == (T, N, 1)
        assert buffer.rewards.tolist() == [[10 * t + n for n in range(N)] for t in range(T)]
        assert buffer.values[:, 0].tolist() == [100 * t for t in range(T)]
        assert buffer.logprobs[:, 0].tolist() == [-t for t in range(T)]
        assert buffer.dones.dtype == torch.bool
        buffer.rewards[2, 1] = 77
        assert 77 in next(buffer.iterate_minibatches(T * N))["rewards"]

    def test_every_stored_step_comes_once_with_its_extras(self) -> None:
        buffer = make_filled_step_buffer()
        buffer.set_extras({"advantages": torch.arange(T * N).view(T, N), "mask": torch.ones(T, N, 2)})
        batches = list(buffer.iterate_minibatches(5))
        assert [len(batch["obs"]) for batch in batches] == [5, 5, 2]
        rows = torch.cat([batch["advantages"] for batch in batches])
        assert sorted(rows.tolist()) == list(range(T * N))
        assert torch.equal(torch.cat([batch["rewards"] for batch in batches]), 10.0 * (rows // N) + rows % N)
        assert batches[0]["mask"].shape == (5, 2)
        assert list(batches[0]) == [*("obs", "actions", "rewards", "dones", "values", "logprobs", "advantages", "mask")]

    def test_extras_are_replaced_and_seen_as_they_are_when_an_epoch_starts(self) -> None:
        buffer = make_filled_step_buffer()
        extra = torch.zeros(T, N)
        buffer.set_extras({"advantages": extra, "old": extra})
        next(buffer.iterate_minibatches(5))
        buffer.set_extras({"advantages": extra})
        extra += 3
        batch = next(buffer.iterate_minibatches(5))
        assert "old" not in batch
        assert batch["advantages"].tolist() == [3.0] * 5
        buffer.set_extras(None)
        assert "advantages" not in next(buffer.iterate_minibatches(5))

    def test_a_partly_filled_buffer_gives_only_what_was_stored(self) -> None:
        buffer = make_filled_step_buffer(steps=2)
        buffer.set_extras({"advantages": torch.arange(T * N).view(T, N)})
        batches = list(buffer.iterate_minibatches(4))
        assert sorted(torch.cat([batch["advantages"] for batch in batches]).tolist()) == list(range(2 * N))

    def test_an_empty_one_is_not_ready(self) -> None:
        with pytest.raises(rl.NotReadyError):
            make_filled_step_buffer(steps=0).iterate_minibatches(4)

    def test_step_counts_and_starts_again(self) -> None:
        buffer = make_filled_step_buffer()
        with pytest.raises(IndexError, match=r"add: expected at most 4 steps, got 5\. Train .* set step = 0"):
            buffer.add(**make_step(9))
        assert buffer.step == T
        buffer.step = 0
        assert buffer.step == 0
        buffer.add(**make_step(7))
        assert buffer.step == 1
        assert next(buffer.iterate_minibatches(N))["obs"].tolist() == [[7.0, 7.0]] * N

    def test_rows_written_directly_are_declared_by_step(self) -> None:
        buffer = make_filled_step_buffer(steps=1)
        buffer.obs[1] = 5
        buffer.step += 1
        assert sorted(next(buffer.iterate_minibatches(2 * N))["obs"][:, 0].tolist()) == [0.0] * N + [5.0] * N

    @pytest.mark.parametrize("done", [torch.tensor([0.0, 1.0, 0.0]), np.array([0, 1, 0]), [False, True, False]])
    def test_flags_of_any_kind_are_understood(self, done: Any) -> None:
        buffer = make_filled_step_buffer(steps=0)
        buffer.add(**make_step(0, done=done))
        assert buffer.dones[0].tolist() == [False, True, False]

    @pytest.mark.parametrize("reward", [torch.zeros(N, 1), torch.zeros(1), torch.zeros(())])
    def test_nothing_is_broadcast(self, reward: torch.Tensor) -> None:
        buffer = make_filled_step_buffer(steps=1)
        with pytest.raises(ValueError, match=r"^reward: expected shape \(3,\)"):
            buffer.add(**make_step(1, reward=reward))
        assert buffer.step == 1

    @pytest.mark.parametrize("extra", [torch.zeros(N, T), torch.zeros(T), torch.zeros(())])
    def test_an_extra_of_another_shape_is_refused_not_left_out(self, extra: torch.Tensor) -> None:
        buffer = make_filled_step_buffer()
        buffer.set_extras({"advantages": extra})
        with pytest.raises(ValueError, match=r"^extra\.advantages: expected shape \(4, 3"):
            buffer.iterate_minibatches(4)
