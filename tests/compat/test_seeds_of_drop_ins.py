"""Adapters without a seed: their draws repeat after `torch.manual_seed`, and no global generator advances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from relive.compat import agilerl, apexrl, embodichain, rl_buffer

N = 16


def apexrl_rollout() -> list[float]:
    buffer, rows = apexrl.RolloutBuffer(N, 1, (1,), (), torch.float32, "cpu"), torch.arange(float(N))
    buffer.add(rows.unsqueeze(1), None, rows, rows, 0 * rows, rows, rows)
    return buffer.get_minibatch(N)[2].tolist()


def apexrl_replay() -> list[float]:
    buffer, rows = apexrl.ReplayBuffer(N, (1,)), torch.arange(float(N))
    buffer.add(rows.unsqueeze(1), rows, rows, rows.unsqueeze(1) + 1, 0 * rows)
    return buffer.sample(N)["rewards"].tolist()


def apexrl_sequences() -> list[float]:
    buffer, rows = apexrl.RolloutRNNBuffer(N, 1, (1,), (), torch.float32, (1, 1), (1, 1), "cpu"), torch.arange(float(N))
    hidden = torch.zeros(1, N, 1)
    buffer.add(rows.unsqueeze(1), None, rows, rows, 0 * rows, rows, rows, hidden, hidden)
    return next(buffer.get_sequence_minibatches(1, N))["actions"].flatten().tolist()


def apexrl_distillation() -> list[float]:
    buffer = apexrl.DistillationBuffer(N, (1,))
    buffer.add(torch.zeros(N, 1), torch.arange(float(N)))
    return buffer.sample(N)[1].tolist()


def older_embodichain() -> list[float]:
    buffer, rows = embodichain.StepRolloutBuffer(1, N, 1, 1, "cpu"), torch.arange(float(N))
    buffer.add(rows.unsqueeze(1), rows.unsqueeze(1), rows, rows < 0, rows, rows)
    return next(buffer.iterate_minibatches(N))["rewards"].tolist()


def embodichain_batches() -> list[float]:
    rollout = embodichain.RolloutBuffer(N, 1, 1, 1, "cpu").start_rollout()
    rollout["reward"][:, 0] = torch.arange(float(N))
    flat = embodichain.transition_view(rollout, flatten=True)
    return next(embodichain.iterate_minibatches(flat, N, "cpu"))["reward"].tolist()


def rl_buffer_replay() -> list[float]:
    buffer, rows = rl_buffer.ReplayBuffer(1, N, (1,), (), rl_buffer.StatsTracker(N)), torch.arange(float(N))
    buffer.add(rows.unsqueeze(1), rows, rows, rows < 0, rows.unsqueeze(1) + 1, rows < 0)
    return buffer.get(N).rewards.tolist()


def rl_buffer_prioritized() -> list[float]:
    buffer = rl_buffer.PrioritizedReplayBuffer(1, N, (1,), (), rl_buffer.StatsTracker(N))
    rows = torch.arange(float(N))
    buffer.add(rows.unsqueeze(1), rows, rows, rows < 0, rows.unsqueeze(1) + 1, rows < 0)
    return buffer.get(3).rewards.tolist()


def rl_buffer_rollout() -> list[float]:
    buffer, rows = rl_buffer.RolloutBuffer(1, N, (1,), (), rl_buffer.StatsTracker(N)), torch.arange(float(N))
    buffer.add(rows.unsqueeze(1), rows, rows, rows < 0, rows, rows)
    buffer.compute_returns_and_advantages(rows, rows < 0)
    return next(buffer.get(N)).values.tolist()


def agilerl_steps(memory: Any) -> Any:
    memory.add(TensorDict({"reward": torch.arange(float(N))}, [N]))
    return memory


def agilerl_replay() -> list[float]:
    return agilerl_steps(agilerl.ReplayBuffer(N)).sample(N)["reward"].flatten().tolist()


def agilerl_prioritized() -> list[float]:
    return agilerl_steps(agilerl.PrioritizedReplayBuffer(N)).sample(3)["reward"].flatten().tolist()


def agilerl_rollout() -> list[float]:
    space = gymnasium.spaces.Box(-1, 1, (1,))
    buffer, rows = agilerl.RolloutBuffer(1, space, space, num_envs=N), torch.arange(float(N))
    buffer.add(rows.unsqueeze(1), rows.unsqueeze(1), rows, rows < 0, rows, rows)
    return buffer.get(N - 1)["rewards"].flatten().tolist()


DRAWS = [
    agilerl_replay, agilerl_prioritized, agilerl_rollout,
    apexrl_rollout, apexrl_replay, apexrl_sequences, apexrl_distillation, older_embodichain, embodichain_batches,
    rl_buffer_replay, rl_buffer_prioritized, rl_buffer_rollout,
]  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS)
def test_the_same_seed_of_torch_gives_the_same_draws_in_one_process(draw: Callable[[], list[float]]) -> None:
    of_numpy = repr(np.random.get_state())  # noqa: NPY002
    found = []
    with torch.random.fork_rng():
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            first = draw()
            assert torch.equal(torch.get_rng_state(), before)
            torch.rand(1)
            found.append([first, draw()])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]
    assert repr(np.random.get_state()) == of_numpy  # noqa: NPY002


def test_every_epoch_of_a_rollout_has_another_order() -> None:
    rollout = embodichain.RolloutBuffer(N, 1, 1, 1, "cpu").start_rollout()
    rollout["reward"][:, 0] = torch.arange(float(N))
    flat = embodichain.transition_view(rollout, flatten=True)
    epochs = [next(embodichain.iterate_minibatches(flat, N, "cpu"))["reward"].tolist() for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
