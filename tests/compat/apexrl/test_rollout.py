"""ApexRL's rollout buffer: its names, its errors and our corrections."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from relive.compat import apexrl
from tests.compat.apexrl.document import (
    DEVICE,
    World,
    documented_gae,
)

N = 3


def make_step(t: int, **changed: Any) -> dict[str, Any]:
    """Make step t: observation t, action t + 0.7, reward 10·t + n, value 2·t, log probability −t."""
    fields = {
        "observations": torch.full((N, 2), float(t)), "privileged_observations": None,
        "actions": torch.full((N, 2), t + 0.7), "rewards": 10.0 * t + torch.arange(N), "dones": torch.zeros(N),
        "values": torch.full((N,), 2.0 * t), "log_probs": torch.full((N,), -1.0 * t),
    }  # fmt: skip
    return {**fields, **changed}


def make_rollout(num_steps: int = 4, filled: int | None = None, **options: Any) -> apexrl.RolloutBuffer:
    buffer = apexrl.RolloutBuffer(N, num_steps, (2,), device="cpu", seed=0, **options)
    for t in range(num_steps if filled is None else filled):
        buffer.add(**make_step(t))
    return buffer


class TestRollout:
    def test_the_golden_case_reads_the_flag_of_the_step_itself(self) -> None:
        buffer = apexrl.RolloutBuffer(1, 3, (1,), device="cpu")
        for done, value in ((0, 0), (1, 0), (0, 10)):
            one = torch.ones(1)
            buffer.add(torch.zeros(1, 1), None, one, one, done * one, value * one, one)
        buffer.compute_returns_and_advantages(torch.zeros(1), gamma=1.0, gae_lambda=1.0)
        assert buffer.returns.flatten().tolist() == [2.0, 1.0, 1.0]

    @given(st.data())
    @settings(deadline=None, max_examples=60)
    def test_advantages_are_those_of_the_documented_loop_over_the_stored_steps(self, data: st.DataObject) -> None:
        steps, envs = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
        stored = data.draw(st.integers(1, steps))
        rates = {
            "gamma": data.draw(st.sampled_from([0.0, 0.9, 1.0])),
            "gae_lambda": data.draw(st.sampled_from([0, 0.8, 1])),
        }
        random = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
        rewards, values, log_probs = torch.randn(3, stored, envs, generator=random)
        dones = (torch.rand(stored, envs, generator=random) < 0.3).float()
        last = torch.randn(envs, generator=random)
        buffer = apexrl.RolloutBuffer(envs, steps, (1,), device="cpu")
        # Steps of an older rollout must not be read.
        for _ in range(data.draw(st.integers(0, 1))):
            for _ in range(steps):
                ones = torch.ones(envs)
                buffer.add(torch.ones(envs, 1), None, ones, ones, ones, ones, ones)
            buffer.clear()
        for t in range(stored):
            obs = torch.full((envs, 1), float(t))
            buffer.add(obs, None, values[t], rewards[t], dones[t], values[t], log_probs[t])
        buffer.compute_returns_and_advantages(last, **rates)
        advantages, returns = documented_gae(rewards, dones, values, last, **rates)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            actual = buffer.get_all_data()
        assert len(told) == (stored < steps)
        for name, rows in actual.items():
            assert rows is None or (len(rows) == steps * envs and not rows[stored * envs :].any()), name
        actual: Any = {name: None if rows is None else rows[: stored * envs] for name, rows in actual.items()}
        assert len(buffer) == stored * envs
        torch.testing.assert_close(actual["advantages"], advantages.flatten(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual["returns"], returns.flatten(), rtol=1e-5, atol=1e-5)
        assert torch.equal(actual["old_log_probs"], log_probs.flatten())
        assert torch.equal(actual["observations"].flatten(), torch.arange(float(stored)).repeat_interleave(envs))
        assert torch.equal(buffer.dones[:stored], dones)
        assert torch.equal(buffer.rewards[:stored], rewards)

    def test_both_constructors_describe_the_same_buffer(self) -> None:
        short = apexrl.RolloutBuffer(N, 4, (2,), "cpu", 5)
        by_name = apexrl.RolloutBuffer(num_envs=N, num_steps=4, obs_shape=(2,), device="cpu", num_privileged_obs=5)
        long = apexrl.RolloutBuffer(N, 4, (2,), (2,), torch.float32, torch.device("cpu"), 5)
        newest = apexrl.RolloutBuffer(N, 4, (2,), (2,), torch.float32, "cpu", privileged_obs_shape=(5,))
        for buffer in (short, by_name, long, newest):
            assert (buffer.num_envs, buffer.num_steps, buffer.obs_shape, buffer.step) == (N, 4, (2,), 0)
            assert buffer.device == torch.device("cpu")
            assert buffer.privileged_observations.shape == (4, N, 5)
            buffer.add(**make_step(1, privileged_observations=torch.ones(N, 5)))
            assert (buffer.action_shape, buffer.action_dtype) == ((2,), torch.float32)
            assert buffer.actions[0].tolist() == [[pytest.approx(1.7)] * 2] * N

    @pytest.mark.parametrize(
        ("actions", "told", "shape", "dtype"),
        [
            (torch.tensor([1, 2, 3]), {}, (), torch.int64),
            (torch.tensor([1, 2, 3], dtype=torch.int32), {}, (), torch.int32),
            (np.full((N, 4), 0.5), {}, (4,), torch.float32),
            (torch.full((N, 2, 2), 0.5), {}, (2, 2), torch.float32),
            (torch.tensor([1, 2, 3]), {"action_dtype": torch.float64}, (), torch.float64),
            (torch.tensor([1.5, 2, 3]), {"action_shape": ()}, (), torch.float32),
        ],
    )
    def test_the_first_actions_say_what_an_action_is(self, actions: Any, told: Any, shape: Any, dtype: Any) -> None:
        buffer = make_rollout(filled=0, **told)
        buffer.add(**make_step(0, actions=actions))
        assert (buffer.action_shape, buffer.action_dtype) == (shape, dtype)
        assert torch.equal(buffer.actions[0], torch.as_tensor(actions).to(dtype))
        buffer.clear()
        with pytest.raises(rl.SchemaError, match="action: expected"):
            buffer.add(**make_step(0, actions=torch.ones(N, 7, 7)))

    def test_a_first_step_that_is_refused_has_said_nothing(self) -> None:
        buffer = make_rollout(filled=0)
        with pytest.raises(rl.SchemaError, match="reward"):
            buffer.add(**make_step(0, actions=torch.ones(N, 9), rewards=torch.ones(N, 1)))
        assert (buffer.action_shape, buffer.step) == ((), 0)
        buffer.add(**make_step(0))
        assert buffer.action_shape == (2,)

    def test_integer_actions_are_never_made_of_fractions(self) -> None:
        buffer = make_rollout(filled=0, action_shape=(2,), action_dtype=torch.long)
        with pytest.raises(rl.SchemaError, match="action: expected int64, got float32"):
            buffer.add(**make_step(0))

    def test_a_step_too_many_is_a_value_error(self) -> None:
        buffer = make_rollout()
        for _ in range(2):
            with pytest.raises(ValueError, match="^add: expected at most 4 steps"):
                buffer.add(**make_step(4))
        assert len(buffer) == 4 * N
        buffer.clear()
        assert (len(buffer), buffer.step) == (0, 0)
        buffer.add(**make_step(9))
        with pytest.warns(rl.DataWarning, match="get_all_data: expected 12 stored rows, got 3"):
            data = buffer.get_all_data()
        assert data["observations"].tolist() == [[9.0, 9.0]] * N + [[0.0, 0.0]] * 3 * N

    def test_nothing_is_trained_on_before_it_is_there(self) -> None:
        with pytest.raises(rl.NotReadyError):
            make_rollout(filled=0).get_all_data()
        data = make_rollout().get_all_data()
        assert not data["advantages"].any()
        assert not data["returns"].any()

    def test_the_scores_of_an_older_rollout_are_gone(self) -> None:
        buffer = make_rollout()
        buffer.compute_returns_and_advantages(torch.ones(N))
        assert buffer.advantages.all()
        buffer.clear()
        buffer.add(**make_step(0))
        assert not buffer.advantages.any()
        assert not buffer.get_minibatch(9)[5].any()

    def test_all_data_and_attributes_share_the_memory(self) -> None:
        buffer = make_rollout()
        buffer.compute_returns_and_advantages(torch.ones(N))
        data = buffer.get_all_data()
        buffer.rewards[0] = 77
        buffer.advantages[1, 2] = 99
        data["observations"][0] = 55
        assert data["advantages"][1 * N + 2] == 99
        assert buffer.observations[0, 0].tolist() == [55, 55]
        assert buffer.rewards[0].tolist() == [77] * N

    def test_attributes_are_written_through(self) -> None:
        buffer = make_rollout()
        buffer.compute_returns_and_advantages(torch.ones(N))
        buffer.advantages = (buffer.advantages - 1) / 2
        assert torch.equal(buffer.get_all_data()["advantages"], buffer.advantages.flatten())
        buffer.rewards *= 2
        buffer.values += 1
        buffer.actions = torch.zeros(4, N, 2)
        buffer.dones[1, 2] = 1
        assert buffer.rewards[1].tolist() == [20, 22, 24]
        assert buffer.core["reward"][1].tolist() == [20, 22, 24]
        assert buffer.core["terminated"].nonzero().tolist() == [[1, 2]]
        assert torch.equal(buffer.core["advantage"], buffer.advantages)
        assert not buffer.get_all_data()["actions"].any()
        assert buffer.get_all_data()["values"].tolist() == [1] * N + [3] * N + [5] * N + [7] * N
        before = buffer.returns
        buffer.compute_returns_and_advantages(torch.ones(N))
        expected, _ = documented_gae(buffer.rewards, buffer.dones, buffer.values, torch.ones(N))
        torch.testing.assert_close(buffer.advantages, expected)
        assert not torch.equal(buffer.returns, before)

    def test_an_assignment_that_does_not_fit_raises_and_changes_nothing(self) -> None:
        buffer = make_rollout(action_dtype=torch.float32)
        for name, wrong in (("rewards", torch.zeros(N)), ("observations", torch.zeros(4, N, 3)), ("dones", 1.0)):
            before = getattr(buffer, name).clone()
            with pytest.raises(rl.SchemaError, match="expected shape"):
                setattr(buffer, name, wrong)
            assert torch.equal(getattr(buffer, name), before)
        with pytest.raises(rl.SchemaError, match="privileged_observations: expected a field of this buffer"):
            buffer.privileged_observations = torch.zeros(4, N, 1)

    def test_step_can_be_set_as_trainers_do(self) -> None:
        buffer = make_rollout()
        buffer.step = 0
        assert (len(buffer), buffer.step) == (0, 0)
        buffer.add(**make_step(5))
        assert buffer.observations[0].eq(5).all()
        # The caller has written two rows into the memory.
        buffer.step = 2
        assert buffer.core["obs"][:, 0, 0].tolist() == [5, 1]
        for wrong in (-1, 5, 1.5, True):
            with pytest.raises(rl.SchemaError, match="step: expected 0 to 4"):
                buffer.step = wrong  # pyright: ignore
        assert buffer.step == 2

    def test_steps_and_scores_are_written_in_any_mode(self) -> None:
        buffer = make_rollout(filled=0)
        for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
            with mode:
                for t in range(4):
                    buffer.add(**make_step(t, values=torch.ones(N, requires_grad=True)))
                buffer.compute_returns_and_advantages(torch.ones(N, requires_grad=True))
            buffer.advantages -= 1
            buffer.rewards *= 2
            assert not buffer.get_all_data()["values"].requires_grad
            buffer.clear()

    def test_axes_of_length_one_in_front_make_no_difference(self) -> None:
        buffer = apexrl.RolloutBuffer(1, 3, (2,), (), torch.float32, "cpu")
        zero = torch.zeros(())
        buffer.add(torch.ones(2), None, zero, 1.0, False, torch.ones(1, 1), zero)
        buffer.add(torch.ones(1, 2), None, zero.view(1), torch.ones(1, 1), zero, zero, np.zeros((1, 1)))
        buffer.add(np.ones((1, 1, 2)), None, [0], [1], [1], [0.0], 0)
        assert buffer.observations.eq(1).all()
        assert buffer.rewards.flatten().tolist() == [1, 1, 1]

    def test_nested_observations_are_tensordicts_with_dtypes_of_their_own(self) -> None:
        spec = {"camera": apexrl.TensorLeafSpec((4, 4), torch.uint8), "body": {"pose": (3,)}}
        buffer = apexrl.RolloutBuffer(N, 2, spec, device="cpu", privileged_obs_shape={"mass": ()})
        assert isinstance(buffer.observations, TensorDict)
        assert buffer.observations.batch_size == (2, N)
        for t in range(2):
            obs: Any = {"camera": torch.full((N, 4, 4), t, dtype=torch.uint8), "body": {"pose": torch.full((N, 3), t)}}
            obs = TensorDict(obs, [N]) if t else obs
            buffer.add(**make_step(t, observations=obs, privileged_observations={"mass": torch.full((N,), t)}))
        assert buffer.observations["camera"].dtype == torch.uint8
        data = buffer.get_all_data()
        assert data["observations"].batch_size == (2 * N,)
        assert data["observations"]["body", "pose"][:, 0].tolist() == [0.0] * N + [1.0] * N
        assert data["privileged_observations"]["mass"].tolist() == [0.0] * N + [1.0] * N
        minibatch = buffer.get_minibatch(5)
        assert torch.equal(minibatch[0]["body", "pose"][:, 0], minibatch[1]["mass"])
        half = {"camera": torch.zeros(N, 4, 4, dtype=torch.uint8), "body": torch.zeros(N, 3)}
        for wrong in (torch.zeros(N, 4), half):
            buffer.clear()
            with pytest.raises(TypeError, match="expected a dict with|expected a tensor"):
                buffer.add(**make_step(0, observations=wrong, privileged_observations={"mass": torch.zeros(N)}))

    def test_privileged_observations_are_never_stale_and_never_dropped(self) -> None:
        with_them = make_rollout(filled=0, num_privileged_obs=3)
        with pytest.raises(rl.SchemaError, match="privileged_observations: expected a value, got None"):
            with_them.add(**make_step(0))
        without = make_rollout(filled=0)
        with pytest.raises(
            rl.SchemaError, match="privileged_observations: expected None without privileged_obs_shape, got Tensor"
        ):
            without.add(**make_step(0, privileged_observations=torch.ones(N, 3)))
        assert len(with_them) == len(without) == 0
        assert without.privileged_observations is None

    @pytest.mark.parametrize(
        "wrong",
        [
            {"rewards": torch.ones(1)}, {"rewards": torch.ones(N, 1)}, {"values": torch.ones(())},
            {"dones": torch.zeros(1)}, {"observations": torch.ones(2)}, {"log_probs": 0.5},
        ],
        ids=str,
    )  # fmt: skip
    def test_nothing_is_broadcast(self, wrong: dict[str, Any]) -> None:
        buffer = make_rollout(filled=1)
        with pytest.raises(rl.SchemaError, match="expected shape"):
            buffer.add(**make_step(1, **wrong))
        assert buffer.step == 1

    def test_dones_are_zeros_and_ones_of_any_kind(self) -> None:
        buffer = make_rollout(filled=0, num_steps=5)
        for dones in (torch.tensor([0.0, 1, 0]), torch.tensor([False, True, False]), np.array([0, 1, 0]), [0, 1, 0]):
            buffer.add(**make_step(0, dones=dones))
        assert buffer.dones.dtype == torch.float32
        assert buffer.dones.tolist() == [[0.0, 1.0, 0.0]] * 4 + [[0.0] * 3]
        for wrong in (0.5, -1.0, float("nan")):
            with pytest.raises(rl.SchemaError, match=f"dones: expected zeros and ones, got {wrong}"):
                buffer.add(**make_step(0, dones=torch.tensor([0.0, wrong, 1.0])))
        assert buffer.step == 4

    @pytest.mark.parametrize("told", [{}, {"action_shape": (12,), "action_dtype": torch.float32}])
    def test_staging_saves_observations_from_an_environment_that_steps_in_place(self, told: dict[str, Any]) -> None:
        world = World(N, 12, in_place=True)
        buffer = apexrl.RolloutBuffer(N, 4, (12,), device=DEVICE, **told)
        obs = world.obs
        for _ in range(4):
            actions, log_probs = world.act(obs)
            values = world.get_value(obs)
            buffer.stage(obs, None, actions)
            obs, rewards, dones, _ = world.step(actions)
            buffer.add(None, None, None, rewards, dones, values, log_probs)
        assert buffer.observations[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert buffer.actions[:, 0, 0].tolist() == [0.5, 1.5, 2.5, 3.5]
        with pytest.raises(ValueError, match="^add: expected at most 4 steps"):
            buffer.stage(obs, None, world.act(obs)[0])

    def test_an_environment_that_steps_in_place_is_noticed_once(self) -> None:
        world = World(N, 12, in_place=True)
        buffer = apexrl.RolloutBuffer(N, 4, (12,), device=DEVICE)
        for _ in range(2):
            buffer.clear()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(4):
                    obs = world.obs
                    actions, log_probs = world.act(obs)
                    values = world.get_value(obs)
                    _, rewards, dones, _ = world.step(actions)
                    buffer.add(obs, None, actions, rewards, dones, values, log_probs)
            actual = [str(each.message) for each in told]
            assert len(actual) == (DEVICE == "cpu" and world.time == 4)
            assert all("observations: expected memory of its own for every step" in text for text in actual)

    def test_fresh_tensors_and_a_world_that_stands_still_are_not_suspected(self) -> None:
        buffer, still = make_rollout(filled=0, num_steps=8), torch.ones(N, 2)
        for t in range(8):
            obs = still if t % 2 else torch.full((N, 2), float(t))
            buffer.add(**make_step(t, observations=still if t < 4 else obs))

    def test_minibatches_are_whole_rows_of_stored_steps_drawn_with_replacement(self) -> None:
        buffer = make_rollout(filled=3)
        buffer.compute_returns_and_advantages(torch.ones(N))
        before = torch.get_rng_state()
        obs, privileged, actions, old_log_probs, advantages, returns, values = buffer.get_minibatch(500)
        assert torch.equal(before, torch.get_rng_state())
        assert privileged is None
        time = obs[:, 0]
        assert set(time.tolist()) == {0.0, 1.0, 2.0}
        torch.testing.assert_close(actions, (time + 0.7).unsqueeze(1).expand(-1, 2))
        assert torch.equal(old_log_probs, -time)
        assert torch.equal(values, 2 * time)
        torch.testing.assert_close(returns, advantages + values)
        counts = torch.bincount(((returns.unsqueeze(1) == buffer.returns[:3].flatten()).float().argmax(1)), minlength=9)
        # Chi-square test with 8 degrees of freedom, p < 0.0003.
        assert (counts - 500 / 9).square().sum() * 9 / 500 < 30
        assert torch.equal(make_rollout().get_minibatch(9)[0], make_rollout().get_minibatch(9)[0])
        obs += 100
        assert buffer.observations.max() < 100
        with pytest.raises(rl.SchemaError, match="batch_size"):
            buffer.get_minibatch(0)

    def test_moves_to_another_device_and_returns_itself(self) -> None:
        buffer = make_rollout(filled=2, num_privileged_obs=0)
        buffer.compute_returns_and_advantages(torch.ones(N))
        advantages = buffer.advantages.clone()
        assert buffer.to("cpu") is buffer
        assert torch.equal(buffer.advantages, advantages)
        buffer.add(**make_step(2))
        assert buffer.observations[:3, 0, 0].tolist() == [0, 1, 2]
        assert buffer.to(torch.device("meta")).device.type == "meta"
        assert buffer.observations.device.type == buffer.advantages.device.type == "meta"
        buffer.add(**make_step(3))
        assert buffer.step == 4

    @pytest.mark.parametrize("computed", [True, False])
    @pytest.mark.parametrize("filled", [0, 2, 4])
    def test_a_state_survives_a_file_that_holds_no_objects(self, tmp_path: Path, filled: int, computed: bool) -> None:
        options: Any = {"privileged_obs_shape": {"mass": apexrl.TensorLeafSpec((), torch.float64)}}
        buffer, other = make_rollout(filled=0, **options), make_rollout(filled=0, **options)
        for t in range(filled):
            buffer.add(**make_step(t, privileged_observations={"mass": torch.full((N,), t, dtype=torch.float64)}))
        if computed and filled:
            buffer.compute_returns_and_advantages(torch.ones(N))
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert other.step == filled
        if filled:
            assert torch.equal(buffer.advantages[:filled], other.advantages[:filled])
            for name, one in buffer.core.data.items():
                assert (one == other.core.data[name]).all(), name
        assert torch.equal(buffer.rewards, other.rewards)
        assert torch.equal(buffer.dones, other.dones)

    def test_a_state_of_another_layout_is_refused_and_changes_nothing(self) -> None:
        buffer = make_rollout()
        for name, wrong in (("num_envs", 9), ("num_steps", 9), ("obs_shape", (9,)), ("privileged_obs_shape", (9,))):
            with pytest.raises(ValueError, match=f"^RolloutBuffer {name} mismatch: "):
                buffer.load_state_dict({**make_rollout().state_dict(), name: wrong})
        with pytest.raises(rl.SchemaError):
            buffer.load_state_dict({**make_rollout().state_dict(), "values": torch.zeros(4, N, 2)})
        assert buffer.rewards[:, 0].tolist() == [0, 10, 20, 30]

    def test_a_staged_step_is_stored_after_a_tensor_has_moved_to_shared_memory(self) -> None:
        buffer = apexrl.RolloutBuffer(num_envs=2, num_steps=4, obs_shape=(3,), action_shape=(2,), device="cpu")
        zeros = torch.zeros(2)
        for i in range(2):
            buffer.stage(torch.full((2, 3), i + 1.0), None, torch.full((2, 2), i + 1.0))
            buffer.add(None, None, None, zeros + i + 1, zeros, zeros, zeros)
            buffer.observations.share_memory_()
            buffer.rewards.share_memory_()
        for stored in (buffer.observations, buffer.actions, buffer.rewards):
            assert stored[:2].flatten(1).unique(dim=1).flatten().tolist() == [1, 2]
