# pyright: reportMissingImports=false
"""EmbodiChain: its collector with PPO and GRPO, on a world that needs no simulator."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from . import Trainer

_ENVS, _STEPS, _ROLLOUTS, _EPISODE_LENGTH = 16, 32, 60, 16
_CPU = torch.device("cpu")


def trainers() -> list[Trainer]:
    """Return PPO and GRPO."""
    task = f"a point on a line, {_ENVS * _STEPS * _ROLLOUTS:,} steps"
    return [Trainer(f"collector and {name}", task, partial(_train, name)) for name in ("PPO", "GRPO")]


class PointsOnLine:
    """Points that an action moves, rewarded near 0; episodes of 16 steps, reset in the same step."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.device = num_envs, _CPU

    def reset(self, **_: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        self.position, self.time = self._draw_positions(), torch.zeros(self.num_envs)
        return self._make_obs(), {}

    def _draw_positions(self) -> torch.Tensor:
        return 4 * torch.rand(self.num_envs, 1) - 2

    def _make_obs(self) -> dict[str, torch.Tensor]:
        return {"state": torch.cat([self.position, self.position.abs()], 1)}

    def step(self, action: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.position = self.position + 0.3 * action[:, :1].clamp(-1, 1)
        self.time += 1
        distance = self.position.abs().squeeze(1)
        terminated, truncated = distance > 4, self.time >= _EPISODE_LENGTH
        done = terminated | truncated
        self.position = torch.where(done.unsqueeze(1), self._draw_positions(), self.position)
        self.time[done] = 0
        return self._make_obs(), -distance, terminated, truncated, {}


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def _make_learner(name: str) -> tuple[Any, Any]:
    """Return a policy and its algorithm."""
    module: Any = import_module("embodichain.learning.rl.algo")
    policies: Any = import_module("embodichain.learning.rl.policies")
    settings: dict[str, Any] = {"batch_size": 128, "n_epochs": 5}
    if name == "PPO":
        policy = policies.ActorCritic(2, 1, _CPU, _network(), _network())
        return policy, module.PPO(module.PPOCfg(**settings), policy)
    policy = policies.ActorOnly(2, 1, _CPU, _network())
    return policy, module.GRPO(module.GRPOCfg(**settings, group_size=8, kl_coef=0.0), policy)


def _train(name: str, seed: int) -> float:
    """Return the mean reward per step of the last five rollouts."""
    collector_class: Any = import_module("embodichain.learning.rl.collector.sync_collector").SyncCollector
    buffer = import_module("embodichain.learning.rl.buffer").RolloutBuffer(_ENVS, _STEPS, 2, 1, _CPU)
    policy, algorithm = _make_learner(name)
    collector = collector_class(env=PointsOnLine(_ENVS), policy=policy, device=_CPU, reset_every_rollout=name == "GRPO")
    rewards = []
    for _ in range(_ROLLOUTS):
        buffer.add(collector.collect(num_steps=_STEPS, rollout=buffer.start_rollout()))
        rollout = buffer.get(flatten=False)
        rewards.append(float(rollout["reward"][:, :-1].mean()))
        algorithm.update(rollout)
    return sum(rewards[-5:]) / 5
