"""Steps that adapters write into the memory of a core rollout buffer."""

from __future__ import annotations

import torch

from relive.compat import apexrl


def test_a_staged_step_is_stored_after_a_tensor_has_moved_to_shared_memory() -> None:
    buffer = apexrl.RolloutBuffer(num_envs=2, num_steps=4, obs_shape=(3,), action_shape=(2,), device="cpu")
    zeros = torch.zeros(2)
    for i in range(2):
        buffer.stage(torch.full((2, 3), i + 1.0), None, torch.full((2, 2), i + 1.0))
        buffer.add(None, None, None, zeros + i + 1, zeros, zeros, zeros)
        buffer.observations.share_memory_()
        buffer.rewards.share_memory_()
    for stored in (buffer.observations, buffer.actions, buffer.rewards):
        assert stored[:2].flatten(1).unique(dim=1).flatten().tolist() == [1, 2]
