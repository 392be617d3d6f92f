"""ApexRL's buffers: its document runs, its names and errors are kept, and what it gets wrong is right."""

from __future__ import annotations

import doctest
import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import recollect as rc
from recollect.compat import apexrl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ROLLOUT_BLOCK = """
from apexrl.buffer.rollout_buffer import RolloutBuffer

buffer = RolloutBuffer(
    num_envs=4096,
    num_steps=24,
    obs_shape=(48,),
    device="cuda",
    num_privileged_obs=0,
)

# Collect data
for step in range(24):
    actions, log_probs = actor.act(obs)
    next_obs, rewards, dones, extras = env.step(actions)
    values = critic.get_value(obs)

    buffer.add(
        observations=obs,
        privileged_observations=None,
        actions=actions,
        rewards=rewards,
        dones=dones.float(),
        values=values,
        log_probs=log_probs,
    )

    obs = next_obs

# Compute advantages
last_values = critic.get_value(obs)
buffer.compute_returns_and_advantages(
    last_values=last_values,
    gamma=0.99,
    gae_lambda=0.95,
)

# Get training data
data = buffer.get_all_data()
"""

LAYOUT_BLOCK = """
# Observations: (num_steps, num_envs, *obs_shape)
self.observations  # Shape: (24, 4096, 48)

# Scalars: (num_steps, num_envs)
self.rewards       # Shape: (24, 4096)
self.dones         # Shape: (24, 4096)
self.values        # Shape: (24, 4096)
self.log_probs     # Shape: (24, 4096)
self.advantages    # Shape: (24, 4096)
self.returns       # Shape: (24, 4096)
"""

GAE_BLOCK = """
def compute_returns_and_advantages(self, last_values, gamma=0.99, gae_lambda=0.95):
    advantages = torch.zeros_like(self.rewards)
    last_gae = torch.zeros(self.num_envs, device=self.device)

    for t in reversed(range(self.num_steps)):
        if t == self.num_steps - 1:
            next_values = last_values
        else:
            next_values = self.values[t + 1]

        delta = self.rewards[t] + gamma * next_values * (1 - self.dones[t]) - self.values[t]
        last_gae = delta + gamma * gae_lambda * (1 - self.dones[t]) * last_gae
        advantages[t] = last_gae

    self.advantages = advantages
    self.returns = advantages + self.values
"""

REPLAY_BLOCK = """
from apexrl.buffer.replay_buffer import ReplayBuffer

buffer = ReplayBuffer(
    capacity=1_000_000,
    obs_shape=(4,),
    action_shape=(2,),
    device="cuda",
)

# Store transition
buffer.add(obs, action, reward, next_obs, done)

# Sample batch
batch = buffer.sample(batch_size=256)
"""

DISTILLATION_BLOCK = """
from apexrl.buffer.distillation_buffer import DistillationBuffer

buffer = DistillationBuffer(
    capacity=100_000,
    obs_shape=(48,),
    device="cuda",
)

# Store expert demonstration
buffer.add(obs, action)

# Sample for distillation
obs, expert_actions = buffer.sample(batch_size=256)
"""


def run(block: str, **names: Any) -> dict[str, Any]:
    """Run a block of the document, with our import line, and CUDA where there is some."""
    lines = ["from recollect.compat.apexrl import *" if "from apexrl" in line else line for line in block.splitlines()]
    exec("\n".join(lines).replace('device="cuda"', f'device="{DEVICE}"'), names)
    return names


def documented_gae(
    rewards: torch.Tensor, dones: torch.Tensor, values: torch.Tensor, last_values: torch.Tensor, **rates: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [T, N] as the document's own code computes them."""
    buffer = SimpleNamespace(rewards=rewards, dones=dones, values=values)
    buffer.num_steps, buffer.num_envs, buffer.device = *rewards.shape, rewards.device
    run(GAE_BLOCK, torch=torch)["compute_returns_and_advantages"](buffer, last_values, **rates)
    return buffer.advantages, buffer.returns


@dataclass
class World:
    """An actor, a critic and an environment of the document, with numbers to recognise."""

    num_envs: int
    num_obs: int
    time: int = 0
    in_place: bool = False

    def __post_init__(self) -> None:
        self.obs = self._seen()

    def _seen(self) -> torch.Tensor:
        ids = torch.arange(self.num_envs, device=DEVICE)
        return (self.time + ids / 8192).unsqueeze(1).expand(-1, self.num_obs).clone()

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return obs[:, :12] + 0.5, -obs[:, 0]

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        return obs[:, 0].clone().requires_grad_() * 2

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.time += 1
        self.obs = self.obs.copy_(self._seen()) if self.in_place else self._seen()
        dones = torch.arange(self.num_envs, device=DEVICE) % 7 == self.time % 7
        return self.obs, actions[:, 0] * 10, dones, {}


class TestDocument:
    def test_the_rollout_loop_runs_and_gives_what_its_own_formula_gives(self) -> None:
        world = World(4096, 48)
        names = run(ROLLOUT_BLOCK, actor=world, critic=world, env=world, obs=world.obs)
        buffer, data = names["buffer"], names["data"]
        time = torch.arange(24.0, device=DEVICE).unsqueeze(1) + torch.arange(4096, device=DEVICE) / 8192
        assert torch.equal(buffer.observations[:, :, 0], time)
        assert torch.equal(buffer.actions, time.unsqueeze(-1).expand(-1, -1, 12) + 0.5)
        expected = documented_gae(10 * (time + 0.5), buffer.dones, 2 * time, names["last_values"].detach())
        torch.testing.assert_close((buffer.advantages, buffer.returns), expected, rtol=1e-5, atol=1e-3)
        assert list(data) == [
            "observations", "privileged_observations", "actions", "old_log_probs", "advantages", "returns", "values",
        ]  # fmt: skip
        assert torch.equal(data["advantages"], buffer.advantages.flatten())
        assert torch.equal(data["old_log_probs"], -time.flatten())
        assert data["privileged_observations"] is None
        assert not data["values"].requires_grad

    def test_every_attribute_has_the_shape_that_is_written_behind_it(self) -> None:
        buffer = apexrl.RolloutBuffer(num_envs=4096, num_steps=24, obs_shape=(48,), device=DEVICE)
        lines = [line.split("# Shape:") for line in LAYOUT_BLOCK.splitlines() if "# Shape:" in line]
        assert len(lines) == 7
        for attribute, shape in lines:
            found = eval(attribute, {"self": buffer})
            assert tuple(found.shape) == eval(shape)
            assert found.dtype == torch.float32

    def test_the_replay_example_keeps_continuous_actions(self) -> None:
        rows = torch.arange(300.0, device=DEVICE)
        names = run(
            REPLAY_BLOCK,
            obs=rows.unsqueeze(1).expand(-1, 4), action=torch.stack([rows + 0.7, -rows - 0.9], 1), reward=rows,
            next_obs=rows.unsqueeze(1).expand(-1, 4) + 1, done=torch.zeros(300, device=DEVICE),
        )  # fmt: skip
        batch = names["batch"]
        assert list(batch) == ["observations", "actions", "rewards", "next_observations", "dones"]
        row = batch["rewards"]
        assert len(row.unique()) > 1
        assert torch.equal(batch["actions"], torch.stack([row + 0.7, -row - 0.9], 1))
        assert torch.equal(batch["observations"], row.unsqueeze(1).expand(-1, 4))
        assert torch.equal(batch["next_observations"], row.unsqueeze(1).expand(-1, 4) + 1)

    def test_the_distillation_example_gives_pairs(self) -> None:
        rows = torch.arange(300.0, device=DEVICE).unsqueeze(1)
        names = run(DISTILLATION_BLOCK, obs=rows.expand(-1, 48), action=rows.expand(-1, 12) + 0.25)
        assert names["obs"].shape == (256, 48)
        assert torch.equal(names["expert_actions"], names["obs"][:, :12] + 0.25)

    @pytest.mark.parametrize("name", ["specs", "rollout", "replay", "distillation", "recurrent", "multi_agent"])
    def test_the_examples_of_the_docstrings_run(self, name: str) -> None:
        results = doctest.testmod(importlib.import_module(f"recollect.compat.apexrl.{name}"))
        assert results.attempted > 0
        assert results.failed == 0


NONE = inspect.Parameter.empty
SIGNATURES: dict[Any, dict[str, Any]] = {
    apexrl.RolloutBuffer.add: dict.fromkeys(
        ("observations", "privileged_observations", "actions", "rewards", "dones", "values", "log_probs"), NONE
    ),
    apexrl.RolloutBuffer.compute_returns_and_advantages: {"last_values": NONE, "gamma": 0.99, "gae_lambda": 0.95},
    apexrl.RolloutBuffer.get_minibatch: {"batch_size": NONE},
    apexrl.RolloutBuffer.to: {"device": NONE},
    apexrl.ReplayBuffer: {
        "capacity": NONE, "obs_shape": NONE, "action_shape": (), "device": "cpu", "obs_dtype": torch.float32,
        "action_dtype": None, "critic_obs_shape": None,
    },
    apexrl.ReplayBuffer.add: {
        **dict.fromkeys(("observations", "actions", "rewards", "next_observations", "dones"), NONE),
        "critic_observations": None, "next_critic_observations": None,
    },
    apexrl.ReplayBuffer.sample: {"batch_size": NONE},
    apexrl.ReplayBuffer.load_state_dict: {"state_dict": NONE},
    apexrl.DistillationBuffer: {"capacity": NONE, "obs_shape": NONE, "device": "cpu"},
    apexrl.DistillationBuffer.add: {"obs": NONE, "action": NONE},
    apexrl.DistillationBuffer.sample: {"batch_size": NONE},
    apexrl.RolloutRNNBuffer: {
        **dict.fromkeys(("num_envs", "num_steps", "obs_shape", "action_shape", "action_dtype"), NONE),
        **dict.fromkeys(("actor_hidden_shape", "critic_hidden_shape", "device"), NONE),
        "privileged_obs_shape": None,
    },
    apexrl.RolloutRNNBuffer.add: dict.fromkeys(
        ("observations", "privileged_observations", "actions", "rewards", "dones", "values", "log_probs",
         "actor_hidden_states", "critic_hidden_states"), NONE
    ),
    apexrl.RolloutRNNBuffer.compute_returns_and_advantages: {"last_values": NONE, "gamma": 0.99, "gae_lambda": 0.95},
    apexrl.RolloutRNNBuffer.get_sequence_minibatches: {
        "sequence_length": NONE, "minibatch_size": NONE, "shuffle": True
    },
    apexrl.MultiAgentRolloutBuffer: {
        **dict.fromkeys(("possible_agents", "num_envs", "num_steps", "obs_specs", "action_shapes"), NONE),
        **dict.fromkeys(("action_dtypes", "device"), NONE), "state_spec": None,
    },
    apexrl.MultiAgentRolloutBuffer.add: dict.fromkeys(
        ("observations", "state", "actions", "rewards", "dones", "values", "log_probs"), NONE
    ),
    apexrl.MultiAgentRolloutBuffer.compute_returns_and_advantages: dict.fromkeys(
        ("last_values", "gamma", "gae_lambda"), NONE
    ),
    apexrl.MultiAgentRolloutBuffer.get_agent_data: {"agent_id": NONE},
    apexrl.space_to_spec: {"space": NONE},
    apexrl.TensorLeafSpec: {"shape": NONE, "dtype": NONE},
}  # fmt: skip
"""Parameters in their order and their defaults, as ApexRL has them; `action_dtype` has none there that is right."""


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__qualname__)
def test_arguments_are_named_ordered_and_defaulted_as_in_apexrl(call: Any) -> None:
    found = dict(inspect.signature(call).parameters)
    found.pop("self", None)
    seed = found.pop("seed", None)  # ours, by name only
    assert seed is None or (seed.kind is inspect.Parameter.KEYWORD_ONLY and seed.default is None)
    assert [(name, parameter.default) for name, parameter in found.items()] == list(SIGNATURES[call].items())
    keyword_only = {name for name, parameter in found.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    multi_agent = (
        call.__qualname__.startswith("MultiAgent") and call is not apexrl.MultiAgentRolloutBuffer.get_agent_data
    )
    assert keyword_only == (set(found) if multi_agent else {"shuffle"} & set(found))


class TestSpecs:
    def test_spaces_become_shapes_and_dtypes(self) -> None:
        spaces = gym.spaces
        spec = apexrl.TensorLeafSpec
        assert apexrl.space_to_spec(spaces.Box(0, 255, (3, 4), np.uint8)) == spec((3, 4), torch.uint8)
        assert apexrl.space_to_spec(spaces.Box(0, 1, (), np.float64)) == spec((1,), torch.float64)
        assert apexrl.space_to_spec(spaces.Discrete(3)) == spec((1,), torch.int64)
        assert apexrl.space_to_spec(spaces.MultiBinary(5)) == spec((5,), torch.int8)
        nested = spaces.Dict(a=spaces.Dict(b=spaces.MultiDiscrete([2, 3])))
        assert apexrl.space_to_spec(nested) == {"a": {"b": spec((2,), torch.int64)}}

    @pytest.mark.parametrize("space", [gym.spaces.Tuple((gym.spaces.Discrete(2),)), gym.spaces.Text(3)])
    def test_other_spaces_are_refused(self, space: Any) -> None:
        with pytest.raises(NotImplementedError, match=f"^Unsupported observation space type: {type(space)}$"):
            apexrl.space_to_spec(space)

    def test_a_leaf_is_a_value(self) -> None:
        leaf = apexrl.TensorLeafSpec((2,), torch.uint8)
        assert leaf == apexrl.TensorLeafSpec(shape=(2,), dtype=torch.uint8)
        with pytest.raises(AttributeError):
            leaf.shape = (3,)  # type: ignore[misc]


N = 3


def step(t: int, **changed: Any) -> dict[str, Any]:
    """One step with numbers to recognise: observation t, action t + 0.7, reward 10·t + n, value 2·t, log prob −t."""
    fields = {
        "observations": torch.full((N, 2), float(t)), "privileged_observations": None,
        "actions": torch.full((N, 2), t + 0.7), "rewards": 10.0 * t + torch.arange(N), "dones": torch.zeros(N),
        "values": torch.full((N,), 2.0 * t), "log_probs": torch.full((N,), -1.0 * t),
    }  # fmt: skip
    return {**fields, **changed}


def make(num_steps: int = 4, filled: int | None = None, **options: Any) -> apexrl.RolloutBuffer:
    buffer = apexrl.RolloutBuffer(N, num_steps, (2,), device="cpu", seed=0, **options)
    for t in range(num_steps if filled is None else filled):
        buffer.add(**step(t))
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
        for _ in range(data.draw(st.integers(0, 1))):  # an older rollout must not be seen
            for _ in range(steps):
                ones = torch.ones(envs)
                buffer.add(torch.ones(envs, 1), None, ones, ones, ones, ones, ones)
            buffer.clear()
        for t in range(stored):
            obs = torch.full((envs, 1), float(t))
            buffer.add(obs, None, values[t], rewards[t], dones[t], values[t], log_probs[t])
        buffer.compute_returns_and_advantages(last, **rates)
        advantages, returns = documented_gae(rewards, dones, values, last, **rates)
        found = buffer.get_all_data()
        assert len(buffer) == len(found["advantages"]) == stored * envs
        torch.testing.assert_close(found["advantages"], advantages.flatten(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["returns"], returns.flatten(), rtol=1e-5, atol=1e-5)
        assert torch.equal(found["old_log_probs"], log_probs.flatten())
        assert torch.equal(found["observations"].flatten(), torch.arange(float(stored)).repeat_interleave(envs))
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
            buffer.add(**step(1, privileged_observations=torch.ones(N, 5)))
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
        buffer = make(filled=0, **told)
        buffer.add(**step(0, actions=actions))
        assert (buffer.action_shape, buffer.action_dtype) == (shape, dtype)
        assert torch.equal(buffer.actions[0], torch.as_tensor(actions).to(dtype))
        buffer.clear()
        with pytest.raises(rc.SchemaError, match="action: expected"):
            buffer.add(**step(0, actions=torch.ones(N, 7, 7)))

    def test_a_first_step_that_is_refused_has_said_nothing(self) -> None:
        buffer = make(filled=0)
        with pytest.raises(rc.SchemaError, match="reward"):
            buffer.add(**step(0, actions=torch.ones(N, 9), rewards=torch.ones(N, 1)))
        assert (buffer.action_shape, buffer.step) == ((), 0)
        buffer.add(**step(0))
        assert buffer.action_shape == (2,)

    def test_integer_actions_are_never_made_of_fractions(self) -> None:
        buffer = make(filled=0, action_shape=(2,), action_dtype=torch.long)
        with pytest.raises(rc.SchemaError, match="action: expected int64, got float32"):
            buffer.add(**step(0))

    def test_a_step_too_many_is_a_value_error(self) -> None:
        buffer = make()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^Rollout buffer is full \(capacity: 4\)$"):
                buffer.add(**step(4))
        assert len(buffer) == 4 * N
        buffer.clear()
        assert (len(buffer), buffer.step) == (0, 0)
        buffer.add(**step(9))
        assert buffer.get_all_data()["observations"].tolist() == [[9.0, 9.0]] * N

    def test_nothing_is_trained_on_before_it_is_there(self) -> None:
        with pytest.raises(rc.NotReadyError):
            make(filled=0).get_all_data()
        data = make(filled=2).get_all_data()
        assert not data["advantages"].any()
        assert not data["returns"].any()

    def test_the_scores_of_an_older_rollout_are_gone(self) -> None:
        buffer = make()
        buffer.compute_returns_and_advantages(torch.ones(N))
        assert buffer.advantages.all()
        buffer.clear()
        buffer.add(**step(0))
        assert not buffer.advantages.any()
        assert not buffer.get_all_data()["returns"].any()

    def test_all_data_and_attributes_share_the_memory(self) -> None:
        buffer = make()
        buffer.compute_returns_and_advantages(torch.ones(N))
        data = buffer.get_all_data()
        buffer.rewards[0] = 77
        buffer.advantages[1, 2] = 99
        data["observations"][0] = 55
        assert data["advantages"][1 * N + 2] == 99
        assert buffer.observations[0, 0].tolist() == [55, 55]
        assert buffer.rewards[0].tolist() == [77] * N

    def test_scores_can_be_assigned_as_trainers_do_and_nothing_else(self) -> None:
        buffer = make(filled=3)
        buffer.compute_returns_and_advantages(torch.ones(N))
        buffer.advantages = (buffer.advantages - 1) / 2
        assert torch.equal(buffer.get_all_data()["advantages"], buffer.advantages[:3].flatten())
        with pytest.raises(AttributeError, match="reward: expected an assignment to advantage or return"):
            buffer.rewards = torch.zeros(4, N)
        assert buffer.rewards[1, 0] == 10

    def test_nested_observations_are_tensordicts_with_dtypes_of_their_own(self) -> None:
        spec = {"camera": apexrl.TensorLeafSpec((4, 4), torch.uint8), "body": {"pose": (3,)}}
        buffer = apexrl.RolloutBuffer(N, 2, spec, device="cpu", privileged_obs_shape={"mass": ()})
        assert isinstance(buffer.observations, TensorDict)
        assert buffer.observations.batch_size == (2, N)
        for t in range(2):
            obs: Any = {"camera": torch.full((N, 4, 4), t, dtype=torch.uint8), "body": {"pose": torch.full((N, 3), t)}}
            obs = TensorDict(obs, [N]) if t else obs
            buffer.add(**step(t, observations=obs, privileged_observations={"mass": torch.full((N,), t)}))
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
            with pytest.raises(TypeError, match="^Observation tree structures must match$"):
                buffer.add(**step(0, observations=wrong, privileged_observations={"mass": torch.zeros(N)}))

    def test_privileged_observations_are_never_stale_and_never_dropped(self) -> None:
        with_them = make(filled=0, num_privileged_obs=3)
        with pytest.raises(rc.SchemaError, match="privileged_observations: expected a value, got none"):
            with_them.add(**step(0))
        without = make(filled=0)
        with pytest.raises(
            rc.SchemaError, match="privileged_observations: expected none, got some that are not declared"
        ):
            without.add(**step(0, privileged_observations=torch.ones(N, 3)))
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
        buffer = make(filled=1)
        with pytest.raises(rc.SchemaError, match="expected shape"):
            buffer.add(**step(1, **wrong))
        assert buffer.step == 1

    def test_dones_are_zeros_and_ones_of_any_kind(self) -> None:
        buffer = make(filled=0, num_steps=5)
        for dones in (torch.tensor([0.0, 1, 0]), torch.tensor([False, True, False]), np.array([0, 1, 0]), [0, 1, 0]):
            buffer.add(**step(0, dones=dones))
        assert buffer.dones.dtype == torch.float32
        assert buffer.dones.tolist() == [[0.0, 1.0, 0.0]] * 4 + [[0.0] * 3]
        for wrong in (0.5, -1.0, float("nan")):
            with pytest.raises(rc.SchemaError, match=f"dones: expected zeros and ones, got {wrong}"):
                buffer.add(**step(0, dones=torch.tensor([0.0, wrong, 1.0])))
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
        with pytest.raises(ValueError, match=r"^Rollout buffer is full \(capacity: 4\)$"):
            buffer.stage(obs, None, world.act(obs)[0])

    def test_minibatches_are_whole_rows_of_stored_steps_drawn_with_replacement(self) -> None:
        buffer = make(filled=3)
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
        assert (counts - 500 / 9).square().sum() * 9 / 500 < 30  # chi square, 8 degrees of freedom: p < 0.0003
        assert torch.equal(make().get_minibatch(9)[0], make().get_minibatch(9)[0])
        obs += 100
        assert buffer.observations.max() < 100
        with pytest.raises(rc.SchemaError, match="batch_size"):
            buffer.get_minibatch(0)

    def test_moves_to_another_device_and_returns_itself(self) -> None:
        buffer = make(filled=2, num_privileged_obs=0)
        buffer.compute_returns_and_advantages(torch.ones(N))
        advantages = buffer.advantages.clone()
        assert buffer.to("cpu") is buffer
        assert torch.equal(buffer.advantages, advantages)
        buffer.add(**step(2))
        assert buffer.observations[:3, 0, 0].tolist() == [0, 1, 2]
        assert buffer.to(torch.device("meta")).device.type == "meta"
        assert buffer.observations.device.type == buffer.advantages.device.type == "meta"
        buffer.add(**step(3))  # from the host
        assert buffer.step == 4

    @pytest.mark.parametrize("computed", [True, False])
    @pytest.mark.parametrize("filled", [0, 2, 4])
    def test_a_state_survives_a_file_that_holds_no_objects(self, tmp_path: Path, filled: int, computed: bool) -> None:
        options: Any = {"privileged_obs_shape": {"mass": apexrl.TensorLeafSpec((), torch.float64)}}
        buffer, other = make(filled=0, **options), make(filled=0, **options)
        for t in range(filled):
            buffer.add(**step(t, privileged_observations={"mass": torch.full((N,), t, dtype=torch.float64)}))
        if computed and filled:
            buffer.compute_returns_and_advantages(torch.ones(N))
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert other.step == filled
        if filled:
            for (name, one), two in zip(buffer.get_all_data().items(), other.get_all_data().values(), strict=True):
                assert (one == two).all(), name
        assert torch.equal(buffer.rewards, other.rewards)
        assert torch.equal(buffer.dones, other.dones)

    def test_a_state_of_another_layout_is_refused_and_changes_nothing(self) -> None:
        buffer = make()
        for name, wrong in (("num_envs", 9), ("num_steps", 9), ("obs_shape", (9,)), ("privileged_obs_shape", (9,))):
            with pytest.raises(ValueError, match=f"^RolloutBuffer {name} mismatch: "):
                buffer.load_state_dict({**make().state_dict(), name: wrong})
        with pytest.raises(rc.SchemaError):
            buffer.load_state_dict({**make().state_dict(), "values": torch.zeros(4, N, 2)})
        assert buffer.rewards[:, 0].tolist() == [0, 10, 20, 30]


def batch(*rows: int, **changed: Any) -> dict[str, Any]:
    """Transitions to recognise: observation i, action i + 0.7, reward 10·i, next observation i + 0.5, critic −i."""
    row = torch.tensor(rows, dtype=torch.float32)
    fields = {
        "observations": row.unsqueeze(1).repeat(1, 2), "actions": (row + 0.7).unsqueeze(1), "rewards": 10 * row,
        "next_observations": row.unsqueeze(1).repeat(1, 2) + 0.5, "dones": (row % 3 == 0).float(),
    }  # fmt: skip
    return {**fields, **changed}


def with_critic(*rows: int) -> dict[str, Any]:
    row = -torch.tensor(rows, dtype=torch.float32)
    return batch(*rows, critic_observations=row.view(-1, 1), next_critic_observations=row.view(-1, 1) - 0.5)


def replay(capacity: int = 5, **options: Any) -> apexrl.ReplayBuffer:
    return apexrl.ReplayBuffer(capacity, (2,), (1,), seed=0, **options)


def stored(buffer: apexrl.ReplayBuffer) -> list[int]:
    """The rows that a replay buffer holds, in the order of ApexRL's memory, with every field checked."""
    state = buffer.state_dict()
    rows = [round(reward / 10) for reward in state["rewards"].tolist()]
    for name, expected in (with_critic if buffer.critic_obs_shape else batch)(*rows).items():
        torch.testing.assert_close(state[name], expected, msg=name)
    return rows


class TestReplay:
    @given(st.integers(1, 9), st.lists(st.one_of(st.integers(0, 9), st.none()), max_size=12), st.booleans())
    @settings(deadline=None, max_examples=80)
    def test_is_the_ring_of_apexrl_row_by_row(self, capacity: int, sizes: list[int | None], critic: bool) -> None:
        buffer = replay(capacity, critic_obs_shape=(1,) if critic else None)
        ring: list[Any] = [None] * capacity
        pos, count = 0, 0
        for size in sizes:
            if size is None:
                buffer.clear()
                ring, pos = [None] * capacity, 0
            elif size > capacity:
                with pytest.raises(ValueError, match=f"^batch size {size} exceeds replay capacity {capacity}$"):
                    buffer.add(**(with_critic if critic else batch)(*range(size)))
            else:
                rows = range(count, count + size)
                buffer.add(**(with_critic if critic else batch)(*rows))
                for row in rows:
                    ring[pos] = row
                    pos = (pos + 1) % capacity
                count += size
            held = [row for row in ring if row is not None]
            assert stored_or_nothing(buffer) == held
            assert (buffer.pos, buffer.full) == (pos, len(held) == capacity)
            assert buffer.size == len(buffer) == len(held)

    def test_draws_are_uniform_with_replacement_and_rows_stay_whole(self) -> None:
        buffer = replay(8, critic_obs_shape=(1,))
        buffer.add(**with_critic(*range(5)))
        buffer.add(**with_critic(*range(5, 11)))
        found = torch.cat([buffer.sample(8)["rewards"] for _ in range(100)])
        counts = torch.bincount((found / 10).long(), minlength=11)
        assert counts[:3].tolist() == [0, 0, 0]
        assert (counts[3:] - 100).square().sum() / 100 < 27  # chi square, 7 degrees of freedom: p < 0.0004
        drawn = buffer.sample(8)
        assert list(drawn) == [
            "observations", "actions", "rewards", "next_observations", "dones",
            "critic_observations", "next_critic_observations",
        ]  # fmt: skip
        expected = with_critic(*(int(reward / 10) for reward in drawn["rewards"]))
        for name, tensor in drawn.items():
            torch.testing.assert_close(tensor, expected[name], msg=name)

    def test_the_first_actions_say_which_dtype_and_later_ones_keep_it(self) -> None:
        for actions, dtype in (
            (torch.tensor([[3]]), torch.int64),
            (torch.tensor([[0.7]]), torch.float32),
            (np.array([[0.7]]), torch.float32),
        ):
            buffer = replay()
            assert buffer.action_dtype is None
            buffer.add(**batch(1, actions=actions))
            assert buffer.action_dtype == buffer.sample(1)["actions"].dtype == dtype
        discrete = replay()
        discrete.add(**batch(1, actions=torch.tensor([[3]])))
        with pytest.raises(rc.SchemaError, match="action: expected int64, got float32"):
            discrete.add(**batch(2))
        assert len(discrete) == 1

    def test_a_declared_integer_action_is_never_made_of_a_fraction(self) -> None:
        buffer = replay(action_dtype=torch.long)
        with pytest.raises(rc.SchemaError, match="action: expected int64, got float32"):
            buffer.add(**batch(1))
        assert buffer.size == 0

    def test_a_first_batch_that_is_refused_has_said_nothing(self) -> None:
        buffer = replay()
        with pytest.raises(rc.SchemaError, match="reward"):
            buffer.add(**batch(1, 2, actions=torch.tensor([[3], [4]]), rewards=torch.ones(1)))
        assert (buffer.action_dtype, buffer.size, buffer.pos) == (None, 0, 0)
        buffer.add(**batch(1, 2))
        assert stored(buffer) == [1, 2]

    def test_scalar_actions_are_the_default(self) -> None:
        buffer = apexrl.ReplayBuffer(4, (2,))
        buffer.add(**batch(1, 2, actions=torch.tensor([5, 5])))
        assert buffer.sample(2)["actions"].tolist() == [5, 5]

    def test_one_transition_needs_no_batch_axis(self) -> None:
        buffer = replay()
        for row in range(7):
            buffer.add(**{name: tensor[0] for name, tensor in batch(row).items()})
        assert stored(buffer) == [5, 6, 2, 3, 4]
        buffer.add([1.0, 1.0], [1.7], 10.0, [1.5, 1.5], False)
        assert stored(buffer) == [5, 6, 1, 3, 4]

    def test_nothing_is_broadcast(self) -> None:
        buffer = replay()
        for wrong in (
            {"rewards": torch.ones(1)}, {"rewards": torch.ones(3, 1)}, {"dones": torch.ones(1)},
            {"actions": torch.ones(3)}, {"next_observations": torch.ones(1, 2)}, {"observations": torch.ones(3, 1)},
        ):  # fmt: skip
            with pytest.raises(rc.SchemaError, match="expected shape"):
                buffer.add(**batch(1, 2, 3, **wrong))
        assert len(buffer) == 0

    def test_an_observation_that_was_overwritten_by_the_next_is_noticed(self) -> None:
        buffer = replay()
        in_place = torch.ones(3, 2)
        with pytest.raises(rc.SchemaError, match="next_obs.observations: expected memory of its own.*reuses its array"):
            buffer.add(**batch(1, 2, 3, observations=in_place, next_observations=in_place))
        with pytest.raises(rc.SchemaError, match="memory of its own"):
            buffer.add(in_place[0], torch.ones(1), 1.0, in_place[0], False)
        path = torch.arange(4.0).unsqueeze(1).repeat(1, 2)
        buffer.add(**batch(1, 2, 3, observations=path[:-1], next_observations=path[1:]))
        assert len(buffer) == 3

    def test_critic_observations_are_never_stale_and_never_dropped(self) -> None:
        with_them, without = replay(critic_obs_shape=(1,)), replay()
        with pytest.raises(rc.SchemaError, match="obs.critic_observations: expected a value, got none"):
            with_them.add(**batch(1))
        with pytest.raises(rc.SchemaError, match="critic_observations: expected none, got some that are not declared"):
            without.add(**with_critic(1))
        given = with_critic(1)
        given.pop("critic_observations")
        with pytest.raises(rc.SchemaError, match="next_critic_observations: expected none"):
            without.add(**given)
        assert len(with_them) == len(without) == 0

    @pytest.mark.parametrize("capacity", [0, -3])
    def test_a_capacity_is_positive(self, capacity: int) -> None:
        with pytest.raises(ValueError, match=f"^capacity must be positive, got {capacity}$"):
            replay(capacity)

    def test_batches_are_positive_and_no_larger_than_what_is_stored(self) -> None:
        buffer = replay()
        with pytest.raises(ValueError, match="^cannot sample 1 transitions from buffer of size 0$"):
            buffer.sample(1)
        buffer.add(**batch(1, 2))
        with pytest.raises(ValueError, match="^cannot sample 3 transitions from buffer of size 2$"):
            buffer.sample(3)
        for wrong in (0, -1):
            with pytest.raises(ValueError, match=f"^batch_size must be positive, got {wrong}$"):
                buffer.sample(wrong)

    def test_nested_observations_are_tensordicts_with_dtypes_of_their_own(self) -> None:
        spec = {"camera": apexrl.TensorLeafSpec((2, 2), torch.uint8), "body": {"pose": (3,)}}
        buffer = apexrl.ReplayBuffer(5, spec, critic_obs_shape={"mass": ()}, obs_dtype=torch.float64)
        for size in (3, 4):
            seen = [
                {
                    "camera": torch.full((size, 2, 2), 7 + later, dtype=torch.uint8),
                    "body": {"pose": torch.full((size, 3), 0.5 + later)},
                }
                for later in range(2)
            ]
            critics = [{"mass": torch.full((size,), 2.0 + later)} for later in range(2)]
            buffer.add(seen[0], torch.arange(size), torch.ones(size), seen[1], torch.zeros(size), *critics)
        drawn = buffer.sample(4)
        assert isinstance(drawn["observations"], TensorDict)
        assert drawn["observations"]["camera"].eq(7).all()
        assert drawn["next_observations"]["camera"].dtype == torch.uint8
        assert drawn["next_observations"]["body", "pose"].eq(1.5).all()
        assert drawn["observations"]["body", "pose"].dtype == torch.float64
        assert drawn["critic_observations"]["mass"].tolist() == [2.0] * 4
        assert drawn["next_critic_observations"]["mass"].tolist() == [3.0] * 4
        other = apexrl.ReplayBuffer(5, spec, critic_obs_shape={"mass": ()}, obs_dtype=torch.float64)
        other.load_state_dict(buffer.state_dict())
        assert other.sample(2)["observations"]["camera"].eq(7).all()
        rest = (torch.zeros(1), torch.zeros(1), seen[1], torch.zeros(1), *critics)
        with pytest.raises(TypeError, match="^Observation tree structures must match$"):
            buffer.add(torch.zeros(1, 3), *rest)
        with pytest.raises(ValueError, match="^Observation tree does not contain tensor leaves$"):
            buffer.add({}, *rest)
        with pytest.raises(rc.SchemaError, match="expected the keys"):
            buffer.add({"body": seen[0]["body"]}, *rest)

    @pytest.mark.parametrize("sizes", [[], [3], [5], [4, 4], [5, 5, 2]])
    def test_a_state_survives_a_file_that_holds_no_objects(self, tmp_path: Path, sizes: list[int]) -> None:
        leaf = apexrl.TensorLeafSpec((2,), torch.float32)
        buffer, other = (apexrl.ReplayBuffer(5, leaf, (1,), critic_obs_shape=(1,)) for _ in range(2))
        count = 0
        for size in sizes:
            buffer.add(**with_critic(*range(count, count + size)))
            count += size
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        other.add(**with_critic(*range(90, 95)))
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for _ in range(3):  # and both go on alike
            assert stored_or_nothing(other) == stored_or_nothing(buffer)
            assert (other.pos, other.full, other.size) == (buffer.pos, buffer.full, buffer.size)
            for one in (buffer, other):
                one.add(**with_critic(count, count + 1))
            count += 2

    def test_a_state_that_apexrl_wrote_is_read(self) -> None:
        """Whole objects in it: a TensorDict, and a leaf's description of a class that is not ours."""
        foreign = SimpleNamespace(shape=(2,), dtype=torch.float32)
        spec = {"x": apexrl.TensorLeafSpec((2,), torch.float32)}
        buffer = apexrl.ReplayBuffer(3, spec, (1,))
        row = torch.tensor([3.0, 1.0, 2.0])  # 3 was written last, over 0
        obs = TensorDict({"x": row.unsqueeze(1).repeat(1, 2)}, [3])
        buffer.load_state_dict(
            {
                "capacity": 3, "obs_shape": {"x": foreign}, "action_shape": [1], "critic_obs_shape": None,
                "obs_dtype": torch.float32, "action_dtype": torch.float32, "pos": 1, "full": True, "size": 3,
                "observations": obs, "next_observations": obs + 1, "actions": row.unsqueeze(1), "rewards": row,
                "dones": torch.zeros(3), "critic_observations": None, "next_critic_observations": None,
            }
        )  # fmt: skip
        new = {"x": torch.full((1, 2), 4.0)}
        buffer.add(new, torch.full((1, 1), 4.0), torch.full((1,), 4.0), {"x": new["x"] + 1}, torch.zeros(1))
        assert buffer.state_dict()["rewards"].tolist() == [3.0, 4.0, 2.0]

    def test_a_state_of_another_layout_is_refused_and_changes_nothing(self) -> None:
        buffer = replay(critic_obs_shape=(1,))
        buffer.add(**with_critic(1, 2))
        state = buffer.state_dict()
        for name in ("obs_shape", "action_shape", "critic_obs_shape"):
            with pytest.raises(ValueError, match=f"^ReplayBuffer {name} mismatch$"):
                buffer.load_state_dict({**state, name: (9,)})
        with pytest.raises(ValueError, match="^ReplayBuffer capacity mismatch: 9 != 5$"):
            buffer.load_state_dict({**state, "capacity": 9})
        with pytest.raises(rc.SchemaError):
            buffer.load_state_dict({**state, "rewards": torch.ones(2, 2)})
        assert stored(buffer) == [1, 2]

    def test_a_state_and_a_batch_are_the_callers_own(self) -> None:
        buffer = replay()
        buffer.add(**batch(1, 2))
        buffer.state_dict()["observations"].zero_()
        buffer.sample(2)["rewards"].zero_()
        assert stored(buffer) == [1, 2]

    def test_a_seed_repeats_the_draws_and_leaves_global_generators_alone(self) -> None:
        before = torch.get_rng_state()
        draws = []
        for seed in (3, 3, None):
            buffer = apexrl.ReplayBuffer(50, (2,), (1,), seed=seed)
            buffer.add(**batch(*range(50)))
            draws.append(buffer.sample(40)["rewards"].tolist())
        assert draws[0] == draws[1] != draws[2]
        assert torch.equal(before, torch.get_rng_state())


def stored_or_nothing(buffer: apexrl.ReplayBuffer) -> list[int]:
    return stored(buffer) if buffer.size else []


class TestDistillation:
    def test_rows_and_batches_are_kept_newest_and_whole(self) -> None:
        buffer = apexrl.DistillationBuffer(5, (2,), "cpu", seed=0)
        rows = torch.arange(7.0).unsqueeze(1)
        buffer.add(rows[:6].expand(-1, 2), rows[:6] + 0.7)
        buffer.add(rows[6].expand(2), rows[6] + 0.7)
        assert buffer.size == len(buffer) == buffer.capacity == 5
        assert (buffer.obs_shape, buffer.device) == ((2,), torch.device("cpu"))
        drawn = torch.cat([torch.cat(buffer.sample(5), 1) for _ in range(40)])
        assert set(drawn[:, 0].tolist()) == {2.0, 3.0, 4.0, 5.0, 6.0}
        assert torch.equal(drawn[:, 2], drawn[:, 0] + 0.7)
        buffer.clear()
        assert len(buffer) == 0

    def test_the_first_actions_say_what_an_action_is(self) -> None:
        buffer = apexrl.DistillationBuffer(5, {"x": (2,)}, "cpu")
        buffer.add({"x": torch.zeros(2, 2)}, torch.tensor([3, 4]))
        obs, actions = buffer.sample(2)
        assert isinstance(obs, TensorDict)
        assert actions.dtype == torch.int64
        with pytest.raises(rc.SchemaError, match="action: expected int64, got float32"):
            buffer.add({"x": torch.zeros(2, 2)}, torch.tensor([0.5, 0.5]))
        with pytest.raises(TypeError, match="^Observation tree structures must match$"):
            buffer.add(torch.zeros(2, 2), torch.tensor([3, 4]))

    def test_errors_are_those_of_the_replay_buffer(self) -> None:
        with pytest.raises(ValueError, match="^capacity must be positive, got 0$"):
            apexrl.DistillationBuffer(0, (2,), "cpu")
        buffer = apexrl.DistillationBuffer(5, (2,), "cpu")
        with pytest.raises(ValueError, match="^cannot sample 1 transitions from buffer of size 0$"):
            buffer.sample(1)
        with pytest.raises(ValueError, match="^batch_size must be positive, got 0$"):
            buffer.sample(0)


def recurrent(
    num_envs: int = 2, num_steps: int = 4, filled: int | None = None, obs_shape: Any = (1,), **options: Any
) -> apexrl.RolloutRNNBuffer:
    """Observation 10·t + n; actor's hidden state 100·layer + 10·t + n, critic's the same with a minus sign."""
    hidden = ((3, 5), (2, 4))
    buffer = apexrl.RolloutRNNBuffer(num_envs, num_steps, obs_shape, (), torch.long, *hidden, "cpu", seed=0, **options)
    for t in range(num_steps if filled is None else filled):
        number = 10.0 * t + torch.arange(num_envs)
        actor, critic = (
            (100 * torch.arange(layers).view(-1, 1, 1) + number.view(1, -1, 1)).expand(-1, -1, size)
            for layers, size in hidden
        )
        obs: Any = number.unsqueeze(1)
        obs = {"x": obs} if isinstance(obs_shape, dict) else obs
        dones = (number % 3 == 0).float()
        buffer.add(obs, None, number.long(), number / 2, dones, number / 4, -number, actor, -critic)
    return buffer


class TestRecurrent:
    def test_the_golden_order_is_that_of_chunks_then_environments(self) -> None:
        batches = list(recurrent().get_sequence_minibatches(2, 3, shuffle=False))
        starts = [(int(x) % 10, int(x) // 10) for batch in batches for x in batch["observations"][0, :, 0]]
        assert starts == [(0, 0), (1, 0), (0, 2), (1, 2)]
        assert [batch["observations"].shape for batch in batches] == [(2, 3, 1), (2, 1, 1)]

    @given(
        st.integers(1, 4), st.sampled_from([(4, 1), (4, 2), (6, 3), (6, 6)]), st.integers(1, 9), st.booleans(),
        st.booleans(),
    )  # fmt: skip
    @settings(deadline=None, max_examples=60)
    def test_sequences_are_slices_of_the_rollout(
        self, envs: int, sizes: tuple[int, int], minibatch: int, shuffle: bool, partly: bool
    ) -> None:
        steps, length = sizes
        chunks = (steps // length + 1) // 2 if partly else steps // length
        buffer = recurrent(envs, steps, filled=chunks * length)
        buffer.compute_returns_and_advantages(torch.ones(envs))
        found = []
        for batch in buffer.get_sequence_minibatches(length, minibatch, shuffle=shuffle):
            count = batch["values"].shape[1]
            assert count <= minibatch
            for i in range(count):
                first = int(batch["observations"][0, i, 0])
                t, n = first // 10, first % 10
                assert t % length == 0
                slices = {
                    "observations": buffer.observations, "actions": buffer.actions, "old_log_probs": buffer.log_probs,
                    "advantages": buffer.advantages, "returns": buffer.returns, "values": buffer.values,
                    "dones": buffer.dones,
                }  # fmt: skip
                for name, whole in slices.items():
                    assert torch.equal(batch[name][:, i], whole[t : t + length, n]), name
                for name in ("actor_hidden_states", "critic_hidden_states"):
                    assert torch.equal(batch[name][:, i], getattr(buffer, name)[t, n])
                found.append((t, n))
        everything = [(chunk * length, n) for chunk in range(chunks) for n in range(envs)]
        assert sorted(found) == everything
        assert shuffle or found == everything

    def test_a_batch_is_what_a_recurrent_network_takes(self) -> None:
        buffer = recurrent()
        batch = next(buffer.get_sequence_minibatches(2, 2, shuffle=False))
        assert list(batch) == [
            "observations", "privileged_observations", "actions", "old_log_probs", "advantages", "returns", "values",
            "dones", "actor_hidden_states", "critic_hidden_states",
        ]  # fmt: skip
        assert batch["privileged_observations"] is None
        assert batch["actor_hidden_states"].tolist() == [[[100.0 * k + n] * 5 for n in range(2)] for k in range(3)]
        assert batch["critic_hidden_states"].shape == (2, 2, 4)
        network = torch.nn.GRU(1, 5, num_layers=3)
        network(batch["observations"], batch["actor_hidden_states"])
        assert buffer.actor_hidden_states.shape == (4, 2, 3, 5)

    def test_an_end_inside_a_sequence_stays_inside(self) -> None:
        (batch,) = recurrent(1).get_sequence_minibatches(4, 9)
        assert batch["dones"].flatten().tolist() == [1.0, 0.0, 0.0, 1.0]

    def test_nested_observations_are_tensordicts(self) -> None:
        for shuffle in (True, False):
            for batch in recurrent(obs_shape={"x": (1,)}).get_sequence_minibatches(2, 3, shuffle=shuffle):
                assert isinstance(batch["observations"], TensorDict)
                assert torch.equal(batch["observations"]["x"][..., 0].long(), batch["actions"])

    def test_sizes_are_refused_as_apexrl_does(self) -> None:
        buffer = recurrent()
        for sizes, message in (
            ((0, 1), "sequence_length must be positive"),
            ((1, 0), "minibatch_size must be positive"),
            ((3, 1), "num_steps must be divisible by sequence_length for recurrent PPO"),
        ):
            with pytest.raises(ValueError, match=f"^{message}$"):
                next(buffer.get_sequence_minibatches(*sizes))
        zeros, hidden = torch.zeros(2), torch.zeros(3, 2, 5)
        with pytest.raises(ValueError, match=r"^Rollout buffer is full \(capacity: 4\)$"):
            buffer.add(zeros, None, zeros, zeros, zeros, zeros, zeros, hidden, hidden)

    def test_a_rollout_that_ends_inside_a_sequence_is_not_ready(self) -> None:
        with pytest.raises(rc.NotReadyError, match="get_sequence_minibatches: expected a multiple of 2 steps, got 3"):
            recurrent(filled=3).get_sequence_minibatches(2, 1)

    def test_hidden_states_are_checked(self) -> None:
        buffer = recurrent(filled=0)
        two = torch.zeros(2)
        step = (torch.zeros(2, 1), None, two.long(), two, two, two, two)
        for wrong in (torch.zeros(2, 3, 5), torch.zeros(3, 1, 5), torch.zeros(5), None):
            with pytest.raises(rc.SchemaError, match="actor_hidden_states: expected"):
                buffer.add(*step, wrong, torch.zeros(2, 2, 4))
        assert len(buffer) == 0

    def test_moves_clears_and_stages_like_the_other(self) -> None:
        buffer = recurrent(filled=1, privileged_obs_shape=None)
        obs, two = torch.full((2, 1), 7.0), torch.zeros(2)
        buffer.stage(obs, None, two.long())
        obs += 1
        buffer.add(None, None, None, two, two, two, two, torch.zeros(3, 2, 5), torch.zeros(2, 2, 4))
        assert buffer.observations[1].tolist() == [[7.0], [7.0]]
        assert (buffer.step, len(buffer)) == (2, 4)
        assert buffer.to("cpu") is buffer
        assert buffer.observations[1].tolist() == [[7.0], [7.0]]
        assert buffer.to("meta").actor_hidden_states.device.type == "meta"
        buffer.clear()
        assert (buffer.step, len(buffer)) == (0, 0)

    def test_privileged_observations_join_the_sequences(self) -> None:
        buffer = apexrl.RolloutRNNBuffer(1, 2, (1,), (), torch.long, (1, 1), (1, 1), "cpu", (2,))
        for t in range(2):
            one, hidden = torch.full((1,), float(t)), torch.zeros(1, 1, 1)
            buffer.add(one.view(1, 1), one.expand(1, 2), one.long(), one, 0 * one, one, one, hidden, hidden)
        (batch,) = buffer.get_sequence_minibatches(2, 1)
        assert batch["privileged_observations"].tolist() == [[[0.0, 0.0]], [[1.0, 1.0]]]


AGENTS = ["walker", "flyer"]


def team(num_steps: int = 4, **options: Any) -> apexrl.MultiAgentRolloutBuffer:
    described: dict[str, Any] = {
        "obs_specs": {"walker": (2,), "flyer": {"pose": (3,)}}, "action_shapes": {"walker": (), "flyer": (2,)},
        "action_dtypes": {"walker": torch.long, "flyer": torch.float32}, "state_spec": (4,), **options,
    }  # fmt: skip
    return apexrl.MultiAgentRolloutBuffer(
        possible_agents=AGENTS, num_envs=N, num_steps=num_steps, device="cpu", **described
    )


def team_step(t: int, random: torch.Generator | None = None, **changed: Any) -> dict[str, Any]:
    """The walker's numbers are t, the flyer's t + 0.5; rewards, values and ends are random."""
    random = random or torch.Generator().manual_seed(t)

    def numbers() -> dict[str, torch.Tensor]:
        return {agent: torch.randn(N, generator=random) for agent in AGENTS}

    fields = {
        "observations": {"walker": torch.full((N, 2), float(t)), "flyer": {"pose": torch.full((N, 3), t + 0.5)}},
        "state": torch.full((N, 4), 9.0 * t),
        "actions": {"walker": torch.full((N,), t), "flyer": torch.full((N, 2), t + 0.5)},
        "dones": {agent: (torch.rand(N, generator=random) < 0.4).float() for agent in AGENTS},
        "rewards": numbers(), "values": numbers(), "log_probs": numbers(),
    }  # fmt: skip
    return {**fields, **changed}


class TestMultiAgent:
    @given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 99))
    @settings(deadline=None, max_examples=40)
    def test_each_agent_has_the_advantages_of_its_own_ends(self, stored: int, more: int, seed: int) -> None:
        buffer, random = team(stored + more), torch.Generator().manual_seed(seed)
        steps = [team_step(t, random) for t in range(stored)]
        for fields in steps:
            buffer.add(**fields)
        last = {agent: torch.randn(N, generator=random) for agent in AGENTS}
        buffer.compute_returns_and_advantages(last_values=last, gamma=0.9, gae_lambda=0.8)
        for agent in AGENTS:
            rewards, dones, values = (
                torch.stack([fields[name][agent] for fields in steps]) for name in ("rewards", "dones", "values")
            )
            advantages, returns = documented_gae(rewards, dones, values, last[agent], gamma=0.9, gae_lambda=0.8)
            data = buffer.get_agent_data(agent)
            assert list(data) == [
                "observations", "states", "actions", "old_log_probs", "advantages", "returns", "values",
            ]  # fmt: skip
            torch.testing.assert_close(data["advantages"], advantages.flatten(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(data["returns"], returns.flatten(), rtol=1e-5, atol=1e-5)
            assert torch.equal(data["values"], values.flatten())
            assert torch.equal(data["states"][:, 0], 9 * torch.arange(float(stored)).repeat_interleave(N))
            assert torch.equal(buffer.dones[agent][:stored], dones)
            assert torch.equal(buffer.rewards[agent][:stored], rewards)
        flyer = buffer.get_agent_data("flyer")
        assert torch.equal(flyer["observations"]["pose"][:, 0], flyer["actions"][:, 0])
        assert torch.equal(buffer.get_agent_data("walker")["actions"], torch.arange(stored).repeat_interleave(N))

    def test_advantages_of_all_agents_are_normalized_together(self) -> None:
        buffer = team()
        for t in range(3):  # the fourth step is missing and does not count
            buffer.add(**team_step(t))
        last = {agent: torch.ones(N) for agent in AGENTS}
        buffer.compute_returns_and_advantages(last_values=last, gamma=0.9, gae_lambda=0.8)
        before = torch.stack([buffer.advantages[agent][:3] for agent in AGENTS])
        buffer.normalize_advantages()
        expected = (before - before.mean()) / (before.std() + 1e-8)
        found = torch.stack([buffer.advantages[agent][:3] for agent in AGENTS])
        torch.testing.assert_close(found, expected)
        assert torch.equal(buffer.get_agent_data("flyer")["advantages"], found[1].flatten())

    def test_attributes_are_dicts_of_the_memory_from_the_start(self) -> None:
        buffer = team()
        assert (buffer.possible_agents, buffer.num_envs, buffer.num_steps) == (AGENTS, N, 4)
        assert buffer.observations["walker"].shape == (4, N, 2)
        assert buffer.observations["flyer"].batch_size == (4, N)
        assert buffer.actions["walker"].dtype == torch.int64
        assert buffer.states.shape == (4, N, 4)
        for name in ("rewards", "dones", "values", "log_probs", "advantages", "returns"):
            found = getattr(buffer, name)
            assert list(found) == AGENTS
            assert all(tensor.shape == (4, N) and tensor.dtype == torch.float32 for tensor in found.values())
        buffer.add(**team_step(0))
        buffer.rewards["flyer"][0] = 5
        assert buffer.get_agent_data("flyer")["states"].shape == (N, 4)
        assert buffer.rewards["flyer"][0].tolist() == [5] * N
        assert team(state_spec=None).states is None

    def test_the_raw_state_is_plain(self, tmp_path: Path) -> None:
        buffer = team()
        buffer.add(**team_step(1))
        state = buffer.get_state_dict()
        assert set(state) == {
            "observations", "states", "actions", "rewards", "dones", "values", "log_probs", "advantages", "returns",
            "step",
        }  # fmt: skip
        torch.save(state, tmp_path / "state.pt")
        read = torch.load(tmp_path / "state.pt", weights_only=True)
        assert read["step"] == 1
        assert read["observations"]["flyer"]["pose"][0].tolist() == [[1.5] * 3] * N

    def test_a_step_too_many_is_a_value_error(self) -> None:
        buffer = team(1)
        buffer.add(**team_step(0))
        with pytest.raises(ValueError, match=r"^Rollout buffer is full \(capacity: 1\)$"):
            buffer.add(**team_step(1))
        buffer.clear()
        assert buffer.step == 0
        buffer.add(**team_step(2))
        assert buffer.get_agent_data("walker")["actions"].tolist() == [2] * N

    def test_a_step_that_is_refused_has_stored_nothing_of_any_agent(self) -> None:
        buffer = team()
        buffer.add(**team_step(0))
        good = team_step(1)
        for wrong, message in (
            ({"rewards": {**good["rewards"], "flyer": torch.ones(1)}}, r"rewards.flyer: expected shape \(3,\)"),
            ({"values": {"walker": torch.ones(N)}}, r"values: expected the agents \['walker', 'flyer'\], got"),
            ({"dones": {**good["dones"], "diver": torch.ones(N)}}, "dones: expected the agents"),
            ({"dones": {**good["dones"], "flyer": torch.full((N,), 0.5)}}, "dones: expected zeros and ones, got 0.5"),
            ({"observations": {"walker": torch.ones(N, 2)}}, "obs: expected the keys"),
            ({"actions": {**good["actions"], "walker": torch.full((N,), 0.5)}}, "action.walker: expected int64, got"),
            ({"state": None}, "state: expected a value, got none"),
        ):
            with pytest.raises(rc.SchemaError, match=message):
                buffer.add(**{**good, **wrong})
        with pytest.raises(rc.SchemaError, match="state: expected none, got one that is not declared"):
            team(state_spec=None).add(**good)
        assert buffer.step == 1
        buffer.add(**good)
        assert buffer.get_agent_data("flyer")["actions"][:, 0].tolist() == [0.5] * N + [1.5] * N
