"""Buffers of the adapters as arguments of a spawned process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from relive.compat import agilerl, apexrl, rl_buffer

pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install stable-baselines3")

from relive.compat.stable_baselines3 import ReplayBuffer as StableReplayBuffer
from relive.compat.stable_baselines3 import RolloutBuffer as StableRolloutBuffer

BOX = spaces.Box(-1, 1, (3,), np.float32)


def agilerl_step(buffer: Any, reward: float) -> None:
    step = {"obs": torch.zeros(1, 3), "action": torch.zeros(1, 1), "next_obs": torch.ones(1, 3)}
    buffer.add(TensorDict({**step, "reward": torch.full((1, 1), reward), "done": torch.zeros(1, 1)}, [1]))


def apexrl_step(buffer: Any, reward: float) -> None:
    obs = torch.zeros(1, 3)
    buffer.add(obs, torch.zeros(1), torch.full((1,), reward), obs + 1, torch.zeros(1))


def rl_buffer_step(buffer: Any, reward: float) -> None:
    obs, no = torch.zeros(1, 3), torch.zeros(1, dtype=torch.bool)
    buffer.add(obs, torch.zeros(1, 1), torch.full((1,), reward), no, obs + 1, no)


def stable_step(buffer: Any, reward: float) -> None:
    obs, rewards = np.zeros((1, 3), np.float32), np.full(1, reward, np.float32)
    buffer.add(obs, obs + 1, np.zeros((1, 3)), rewards, np.zeros(1, np.bool_), [{}])


def stable_rollout_step(buffer: Any, reward: float) -> None:
    obs, zero = np.zeros((1, 3), np.float32), torch.zeros(1)
    buffer.add(obs, np.zeros((1, 3)), np.full(1, reward, np.float32), np.zeros(1, np.bool_), zero, zero)


REPLAY = (4, 1, (3,), (1,), rl_buffer.StatsTracker(1))
BUFFERS: dict[str, tuple[Any, Callable[[Any, float], None], str]] = {
    "AgileRL": (lambda: agilerl.ReplayBuffer(4), agilerl_step, "storage.reward"),
    "AgileRL, prioritized": (lambda: agilerl.PrioritizedReplayBuffer(4), agilerl_step, "storage.reward"),
    "ApexRL": (lambda: apexrl.ReplayBuffer(4, (3,)), apexrl_step, "rewards"),
    "rl-buffer": (lambda: rl_buffer.ReplayBuffer(*REPLAY), rl_buffer_step, "_rewards"),
    "rl-buffer, prioritized": (lambda: rl_buffer.PrioritizedReplayBuffer(*REPLAY), rl_buffer_step, "_rewards"),
    "Stable-Baselines3": (lambda: StableReplayBuffer(4, BOX, BOX), stable_step, "rewards"),
    "Stable-Baselines3, rollout": (lambda: StableRolloutBuffer(4, BOX, BOX), stable_rollout_step, "rewards"),
}
"""How each is made, how a step is added, and where its rewards are."""


def rewards_of(name: str, buffer: Any) -> list[float]:
    """Return four rewards of the memory of a buffer."""
    for part in BUFFERS[name][2].split("."):
        buffer = buffer[part] if isinstance(buffer, TensorDict) else getattr(buffer, part)
    return torch.as_tensor(buffer).flatten().tolist()


def add_one(buffers: dict[str, Any], answers: Any) -> None:
    """Add a step to each buffer, in the spawned process."""
    for name, buffer in buffers.items():
        BUFFERS[name][1](buffer, 3.0)
    answers.put({name: rewards_of(name, buffer)[:3] for name, buffer in buffers.items()})


def test_a_spawned_process_gets_a_copy_and_its_parent_keeps_the_buffer() -> None:
    buffers = {name: make() for name, (make, _, _) in BUFFERS.items()}
    for name, buffer in buffers.items():
        for reward in (1.0, 2.0):
            BUFFERS[name][1](buffer, reward)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=add_one, args=(buffers, answers))
    process.start()
    assert answers.get(timeout=120) == {name: [1.0, 2.0, 3.0] for name in BUFFERS}
    process.join(timeout=60)
    assert process.exitcode == 0
    for name, buffer in buffers.items():
        BUFFERS[name][1](buffer, 4.0)
        assert rewards_of(name, buffer)[:3] == [1.0, 2.0, 4.0], name
