"""ApexRL's rollout buffer of several agents: each agent has its own ends, and a step is stored for all or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from relive.compat import apexrl
from tests.compat.apexrl.document import (
    documented_gae,
)

N = 3
AGENTS = ["walker", "flyer"]


def make_team_buffer(num_steps: int = 4, **options: Any) -> apexrl.MultiAgentRolloutBuffer:
    described: dict[str, Any] = {
        "obs_specs": {"walker": (2,), "flyer": {"pose": (3,)}}, "action_shapes": {"walker": (), "flyer": (2,)},
        "action_dtypes": {"walker": torch.long, "flyer": torch.float32}, "state_spec": (4,), **options,
    }  # fmt: skip
    return apexrl.MultiAgentRolloutBuffer(
        possible_agents=AGENTS, num_envs=N, num_steps=num_steps, device="cpu", **described
    )


def make_team_step(t: int, random: torch.Generator | None = None, **changed: Any) -> dict[str, Any]:
    """Make step t: the walker's observations are t, the flyer's t + 0.5; rewards, values and ends are random."""
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
        buffer, random = make_team_buffer(stored + more), torch.Generator().manual_seed(seed)
        steps = [make_team_step(t, random) for t in range(stored)]
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
        buffer = make_team_buffer()
        # The fourth step is not stored, so it does not count.
        for t in range(3):
            buffer.add(**make_team_step(t))
        last = {agent: torch.ones(N) for agent in AGENTS}
        buffer.compute_returns_and_advantages(last_values=last, gamma=0.9, gae_lambda=0.8)
        before = torch.stack([buffer.advantages[agent][:3] for agent in AGENTS])
        buffer.normalize_advantages()
        expected = (before - before.mean()) / (before.std() + 1e-8)
        actual = torch.stack([buffer.advantages[agent][:3] for agent in AGENTS])
        torch.testing.assert_close(actual, expected)
        assert torch.equal(buffer.get_agent_data("flyer")["advantages"], actual[1].flatten())

    def test_attributes_are_dicts_of_the_memory_from_the_start(self) -> None:
        buffer = make_team_buffer()
        assert (buffer.possible_agents, buffer.num_envs, buffer.num_steps) == (AGENTS, N, 4)
        assert buffer.observations["walker"].shape == (4, N, 2)
        assert buffer.observations["flyer"].batch_size == (4, N)
        assert buffer.actions["walker"].dtype == torch.int64
        assert buffer.states.shape == (4, N, 4)
        for name in ("rewards", "dones", "values", "log_probs", "advantages", "returns"):
            actual = getattr(buffer, name)
            assert list(actual) == AGENTS
            assert all(tensor.shape == (4, N) and tensor.dtype == torch.float32 for tensor in actual.values())
        buffer.add(**make_team_step(0))
        buffer.rewards["flyer"][0] = 5
        assert buffer.get_agent_data("flyer")["states"].shape == (N, 4)
        assert buffer.rewards["flyer"][0].tolist() == [5] * N
        assert make_team_buffer(state_spec=None).states is None

    def test_an_agents_tensors_are_written_by_assigning_them(self) -> None:
        buffer = make_team_buffer()
        for t in range(4):
            buffer.add(**make_team_step(t))
        buffer.rewards["walker"] = torch.full((4, N), 3.0)
        buffer.rewards["walker"] *= 2
        buffer.dones["flyer"][1] = 1
        buffer.values = {agent: torch.zeros(4, N) for agent in AGENTS}
        buffer.log_probs.update(walker=torch.ones(4, N))
        last = {agent: torch.zeros(N) for agent in AGENTS}
        buffer.compute_returns_and_advantages(last_values=last, gamma=1.0, gae_lambda=1.0)
        assert buffer.get_agent_data("walker")["old_log_probs"].eq(1).all()
        assert not buffer.get_agent_data("flyer")["values"].any()
        buffer.advantages["flyer"] = torch.full((4, N), 5.0)
        buffer.returns |= {"flyer": torch.full((4, N), 6.0)}
        assert buffer.get_agent_data("flyer")["advantages"].eq(5).all()
        assert buffer.get_agent_data("flyer")["returns"].eq(6).all()
        assert torch.equal(buffer.core["reward", "walker"], torch.full((4, N), 6.0))
        assert torch.equal(buffer.core["advantage", "flyer"], torch.full((4, N), 5.0))

    def test_an_assignment_that_would_be_lost_raises(self) -> None:
        buffer = make_team_buffer()
        with pytest.raises(KeyError, match="diver"):
            buffer.rewards["diver"] = torch.zeros(4, N)
        with pytest.raises(rl.SchemaError, match="reward.flyer: expected shape"):
            buffer.rewards["flyer"] = torch.zeros(N)
        for lost in (lambda: buffer.rewards.pop("flyer"), buffer.rewards.clear):
            with pytest.raises(TypeError, match="expected the tensors of every agent"):
                lost()
        buffer.step = 0
        with pytest.raises(rl.SchemaError, match="step: expected 0 to 4"):
            buffer.step = 5

    def test_the_raw_state_is_plain(self, tmp_path: Path) -> None:
        buffer = make_team_buffer()
        buffer.add(**make_team_step(1))
        state = buffer.get_state_dict()
        assert set(state) == {
            "observations", "states", "actions", "rewards", "dones", "values", "log_probs", "advantages", "returns",
            "step",
        }  # fmt: skip
        torch.save(state, tmp_path / "state.pt")
        read = torch.load(tmp_path / "state.pt", weights_only=True)
        assert read["step"] == 1
        assert read["states"][0].tolist() == [[9.0] * 4] * N
        assert read["observations"]["flyer"]["pose"][0].tolist() == [[1.5] * 3] * N

    def test_a_step_too_many_is_a_value_error(self) -> None:
        buffer = make_team_buffer(1)
        buffer.add(**make_team_step(0))
        with pytest.raises(ValueError, match="^add: expected at most 1 steps"):
            buffer.add(**make_team_step(1))
        buffer.clear()
        assert buffer.step == 0
        buffer.add(**make_team_step(2))
        assert buffer.get_agent_data("walker")["actions"].tolist() == [2] * N

    def test_a_step_that_is_refused_has_stored_nothing_of_any_agent(self) -> None:
        buffer = make_team_buffer()
        buffer.add(**make_team_step(0))
        good = make_team_step(1)
        for wrong, message in (
            ({"rewards": {**good["rewards"], "flyer": torch.ones(1)}}, r"reward.flyer: expected shape \(3,\)"),
            (
                {"values": {"walker": torch.ones(N)}},
                r"value: expected the keys \['flyer', 'walker'\], got the keys \['walker'\]",
            ),
            ({"dones": {**good["dones"], "diver": torch.ones(N)}}, "done: expected the keys"),
            ({"dones": {**good["dones"], "flyer": torch.full((N,), 0.5)}}, "dones: expected zeros and ones, got 0.5"),
            ({"observations": {"walker": torch.ones(N, 2)}}, "obs: expected the keys"),
            ({"actions": {**good["actions"], "walker": torch.full((N,), 0.5)}}, "action.walker: expected int64, got"),
            ({"state": None}, "state: expected a value, got None"),
        ):
            with pytest.raises(rl.SchemaError, match=message):
                buffer.add(**{**good, **wrong})
        with pytest.raises(rl.SchemaError, match=r"last_values.flyer: expected shape \(3,\)"):
            buffer.compute_returns_and_advantages(
                last_values={"walker": torch.ones(N), "flyer": torch.ones(1)}, gamma=0.9, gae_lambda=0.8
            )
        with pytest.raises(rl.SchemaError, match="state: expected None without state_spec, got Tensor"):
            make_team_buffer(state_spec=None).add(**good)
        assert buffer.step == 1
        buffer.add(**good)
        assert buffer.get_agent_data("flyer")["actions"][:, 0].tolist() == [0.5] * N + [1.5] * N
