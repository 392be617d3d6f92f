"""The code blocks of ApexRL's documentation run on our buffers."""

from __future__ import annotations

import doctest
import importlib

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
