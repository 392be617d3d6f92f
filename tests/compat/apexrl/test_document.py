"""The code blocks of ApexRL's documentation run on our buffers."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any

import pytest
import torch

from relive.compat import apexrl
from tests.compat.apexrl.document import (
    DEVICE,
    DISTILLATION_BLOCK,
    LAYOUT_BLOCK,
    REPLAY_BLOCK,
    ROLLOUT_BLOCK,
    World,
    documented_gae,
    run,
)


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
            actual = eval(attribute, {"self": buffer})
            assert tuple(actual.shape) == eval(shape)
            assert actual.dtype == torch.float32

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

    @pytest.mark.parametrize(
        "name",
        [
            "utils.observation",
            "buffer.rollout_buffer",
            "buffer.replay_buffer",
            "buffer.distillation_buffer",
            "buffer.rollout_rnn_buffer",
            "buffer.multi_agent_rollout_buffer",
        ],
    )
    def test_the_examples_of_the_docstrings_run(self, name: str) -> None:
        results = doctest.testmod(importlib.import_module(f"relive.compat.apexrl.{name}"))
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
    actual = dict(inspect.signature(call).parameters)
    actual.pop("self", None)
    # ApexRL has no seed; ours is a keyword-only argument.
    seed = actual.pop("seed", None)
    assert seed is None or (seed.kind is inspect.Parameter.KEYWORD_ONLY and seed.default is None)
    assert [(name, parameter.default) for name, parameter in actual.items()] == list(SIGNATURES[call].items())
    keyword_only = {name for name, parameter in actual.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    multi_agent = (
        call.__qualname__.startswith("MultiAgent") and call is not apexrl.MultiAgentRolloutBuffer.get_agent_data
    )
    assert keyword_only == (set(actual) if multi_agent else {"shuffle"} & set(actual))
