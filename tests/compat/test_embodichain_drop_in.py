"""EmbodiChain's buffers as replacements: writes to attributes, copies, and rollouts with other fields."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import relive as rl
from relive.compat import embodichain, patch
from relive.compat.embodichain.agents.rl.buffer import RolloutBuffer as OlderBuffer
from relive.compat.embodichain.learning.rl.algo.common import compute_gae
from relive.compat.embodichain.learning.rl.buffer import RolloutBuffer, iterate_minibatches, transition_view

N, T = 3, 4
COPIES = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]


def make_step_buffer(steps: int = T) -> OlderBuffer:
    buffer = OlderBuffer(T, N, 2, 1, "cpu", seed=0)
    for t in range(steps):
        add(buffer, t)
    return buffer


def add(buffer: Any, t: int) -> None:
    numbers = torch.full((N,), float(t))
    buffer.add(numbers.unsqueeze(1).expand(N, 2), numbers.unsqueeze(1), numbers, numbers > 8, numbers, -numbers)


def written() -> tuple[RolloutBuffer, TensorDict]:
    buffer = RolloutBuffer(N, T, 2, 1, "cpu")
    rollout = buffer.start_rollout()
    rollout["reward"][:, :-1] = torch.arange(float(T))
    rollout["value"][:] = 0.5
    return buffer, rollout


class TestTwoBuffersOfOneName:
    def test_each_is_at_its_path(self) -> None:
        assert embodichain.RolloutBuffer is RolloutBuffer
        assert embodichain.StepRolloutBuffer is OlderBuffer
        assert RolloutBuffer.__name__ == OlderBuffer.__name__ == "RolloutBuffer"
        moved = importlib.import_module("relive.compat.embodichain.agents.rl.buffer.standard_buffer")
        assert moved.RolloutBuffer is RolloutBuffer

    def test_the_newer_one_refuses_the_older_ones_calls_with_a_sentence(self) -> None:
        with pytest.raises(
            TypeError, match=r"expected \(num_envs, rollout_len, …\), got num_steps.*agents\.rl\.buffer"
        ):
            RolloutBuffer(num_steps=T, num_envs=N, obs_dim=2, action_dim=1, device="cpu")  # pyright: ignore
        # Positional sizes do not show which of the two buffers was meant.
        buffer = RolloutBuffer(T, N, 2, 1, "cpu")
        with pytest.raises(TypeError, match=r"add: expected the shared rollout, got the fields of one step.*num_steps"):
            add(buffer, 0)
        for name in ("set_extras", "iterate_minibatches", "step", "rewards"):
            with pytest.raises(AttributeError, match=f"a name of the newer buffer, got {name}"):
                getattr(buffer, name)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = buffer.nothing

    def test_the_older_one_refuses_the_newer_ones_names(self) -> None:
        with pytest.raises(TypeError, match="rollout_len"):
            OlderBuffer(num_envs=N, rollout_len=T, obs_dim=2, action_dim=1, device="cpu")  # pyright: ignore


class TestOlderBuffer:
    def test_attributes_are_the_memory_also_when_they_are_assigned(self) -> None:
        buffer = make_step_buffer()
        buffer.rewards = torch.full((T, N), 7.0)
        buffer.values += 1
        buffer.obs *= 2
        buffer.dones[0, 1] = True
        (batch,) = buffer.iterate_minibatches(T * N)
        assert batch["rewards"].eq(7).all()
        assert sorted(batch["values"].tolist()) == sorted([1.0, 2, 3, 4] * N)
        assert batch["dones"].sum() == 1
        assert buffer.core["terminated"][0].tolist() == [False, True, False]
        assert torch.equal(buffer.core["obs"][:, 0, 0], torch.tensor([0.0, 2, 4, 6]))
        with pytest.raises(rl.SchemaError, match="reward: expected shape"):
            buffer.rewards = torch.zeros(T)

    def test_one_environment_needs_no_axis(self) -> None:
        buffer = OlderBuffer(2, 1, 2, 1, "cpu")
        buffer.add(torch.ones(2), torch.ones(1), 1.0, 0.0, torch.ones(1, 1), torch.zeros(()))
        assert buffer.obs[0].tolist() == [[1.0, 1.0]]


class TestSharedRollout:
    @pytest.mark.parametrize("copied", COPIES)
    def test_a_copy_holds_the_same_in_memory_of_its_own(self, copied: Any) -> None:
        buffer, rollout = written()
        rollout["advantage"] = torch.ones(N, T + 1)
        buffer.add(rollout)
        other = copied(buffer)
        assert other.is_full()
        actual = other.get(flatten=False)
        assert torch.equal(actual["reward"], rollout["reward"])
        assert actual["advantage"].eq(1).all()
        actual["reward"].zero_()
        assert rollout["reward"].any()
        assert other.start_rollout() is other.buffer
        other.add(other.buffer)
        assert other.core["reward"].eq(0).all()

    def test_views_and_batches_have_the_device_of_the_rollout(self) -> None:
        _, rollout = written()
        flat = transition_view(rollout, flatten=True)
        batch = next(iterate_minibatches(flat, 4, "cpu"))
        assert flat.device == batch.device == rollout.device == torch.device("cpu")
        batch["entropy"] = torch.zeros(4)
        assert batch.batch_size == (4,)

    def test_nested_fields_come_along(self) -> None:
        _, rollout = written()
        rollout["info"] = TensorDict({"score": torch.arange(T + 1.0).expand(N, -1)}, [N, T + 1])
        flat = transition_view(rollout, flatten=True)
        assert flat["info", "score"].tolist() == [0.0, 1, 2, 3] * N
        assert next(iterate_minibatches(flat, 5, "cpu"))["info", "score"].shape == (5,)

    def test_only_what_is_read_must_be_there(self) -> None:
        rollout = TensorDict({"reward": torch.ones(N, T + 1), "value": torch.zeros(N, T + 1)}, [N, T + 1])
        rollout["done"] = torch.zeros(N, T + 1)
        # The flags are numbers, and "terminated" and "truncated" are missing.
        rollout["done"][0, 1] = 1.0
        _, returns = compute_gae(rollout, 1.0, 1.0)
        assert returns.tolist() == [[2.0, 1.0, 2.0, 1.0], *[[4.0, 3.0, 2.0, 1.0]] * 2]
        view = transition_view(rollout)
        assert torch.equal(view["next_value"], rollout["value"][:, 1:])
        only_obs = TensorDict({"obs": torch.arange(6.0)}, [6])
        assert sorted(x for batch in iterate_minibatches(only_obs, 4, "cpu") for x in batch["obs"].tolist()) == [
            *range(6)
        ]


class Line:
    """Environment for EmbodiChain's collector: points on a line with larger rewards near 0."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")

    def reset(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        self.place = torch.rand(self.num_envs, 1) * 4 - 2
        self.time = torch.zeros(self.num_envs)
        return {"state": self.place}, {}

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        self.place = self.place + 0.3 * action.clamp(-1, 1)
        self.time += 1
        reward, truncated = -self.place.abs().squeeze(1), self.time >= 16
        self.place = torch.where(truncated.unsqueeze(1), torch.rand(self.num_envs, 1) * 4 - 2, self.place)
        self.time = self.time.masked_fill(truncated, 0)
        return {"state": self.place}, reward, torch.zeros_like(truncated), truncated, {}


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_its_collector_and_algorithms_learn_on_ours(name: str) -> None:
    pytest.importorskip("embodichain.learning.rl.algo", reason="no extra installs embodichain: it needs a simulator")
    theirs = "embodichain.learning.rl"
    algorithm, policies, collector, buffers = (
        importlib.import_module(f"{theirs}.{part}")
        for part in ("algo", "policies", "collector.sync_collector", "buffer")
    )
    torch.manual_seed(0)
    cpu, envs = torch.device("cpu"), 16

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    if name == "ppo":
        policy = policies.ActorCritic(1, 1, cpu, network(), network())
        learner = algorithm.PPO(algorithm.PPOCfg(batch_size=128, n_epochs=5), policy)
    else:
        policy = policies.ActorOnly(1, 1, cpu, network())
        learner = algorithm.GRPO(algorithm.GRPOCfg(batch_size=128, n_epochs=5, group_size=8, kl_coef=0.0), policy)
    collect = collector.SyncCollector(env=Line(envs), policy=policy, device=cpu, reset_every_rollout=name == "grpo")
    rewards = []
    with patch("embodichain"):
        buffer = buffers.RolloutBuffer(envs, 32, 1, 1, cpu)
        assert type(buffer) is RolloutBuffer
        for _ in range(25):
            buffer.add(collect.collect(num_steps=32, rollout=buffer.start_rollout()))
            rollout = buffer.get(flatten=False)
            rewards.append(float(rollout["reward"][:, :-1].mean()))
            learner.update(rollout)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
