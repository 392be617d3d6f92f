"""A small vector environment with the interface of rsl_rl, and configurations of its runners."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict


class Pucks(VecEnv):
    """Pucks on a plane that an action pushes; the reward is high near the origin.

    Episodes time out after 12 steps and end where a puck slides off. The policy sees position and velocity, the group
    "critic" the time, too.
    """

    def __init__(self, num_envs: int = 16, seed: int = 0) -> None:
        self.num_envs, self.num_actions, self.max_episode_length = num_envs, 2, 12
        self.device, self.cfg = "cpu", {}
        self._random = torch.Generator().manual_seed(seed)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self._place, self._speed = torch.zeros(num_envs, 2), torch.zeros(num_envs, 2)
        self._reset(torch.ones(num_envs, dtype=torch.bool))

    def _reset(self, is_restarted: torch.Tensor) -> None:
        self._place[is_restarted] = 4 * torch.rand(int(is_restarted.sum()), 2, generator=self._random) - 2
        self._speed[is_restarted] = 0
        self.episode_length_buf[is_restarted] = 0

    def get_observations(self) -> TensorDict:
        policy = torch.cat([self._place, self._speed], -1)
        time = self.episode_length_buf.unsqueeze(-1) / self.max_episode_length
        return TensorDict({"policy": policy, "critic": torch.cat([policy, time], -1)}, [self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict]:
        self._speed += 0.5 * actions.clamp(-1, 1)
        self._place += 0.5 * self._speed
        self.episode_length_buf += 1
        # Rewards are never negative, so that an early end of the episode does not pay.
        reward = (1 - self._place.norm(dim=-1) / 4).clamp(min=0)
        off = self._place.norm(dim=-1) > 4
        time_outs = (self.episode_length_buf >= self.max_episode_length) & ~off
        self._reset(off | time_outs)
        return self.get_observations(), reward, (off | time_outs).long(), {"time_outs": time_outs}


def ppo_settings(**algorithm: Any) -> dict[str, Any]:
    """Return a configuration of the on-policy runner."""
    network = {"class_name": "MLPModel", "hidden_dims": [32], "activation": "elu"}
    actor = {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}}
    return copy.deepcopy(
        {
            "num_steps_per_env": 16,
            "save_interval": 1000,
            "obs_groups": {"actor": ["policy"], "critic": ["policy", "critic"]},
            "actor": actor,
            "critic": network,
            "algorithm": {"class_name": "PPO", "learning_rate": 3e-3, "entropy_coef": 0.0, **algorithm},
        }
    )


def distillation_settings() -> dict[str, Any]:
    """Return a configuration of the distillation runner."""
    settings = ppo_settings()
    settings["student"], settings["teacher"] = settings.pop("actor"), settings.pop("critic")
    settings["teacher"]["distribution_cfg"] = dict(settings["student"]["distribution_cfg"])
    settings["obs_groups"] = {"student": ["policy"], "teacher": ["policy", "critic"]}
    settings["algorithm"] = {"class_name": "Distillation", "gradient_length": 4, "num_learning_epochs": 2}
    return settings


def make_recurrent(settings: dict[str, Any], *models: str, kind: str = "lstm") -> dict[str, Any]:
    """Return a configuration with recurrent networks in place of the others."""
    for model in models:
        settings[model] |= {"class_name": "RNNModel", "rnn_type": kind, "rnn_hidden_dim": 8, "rnn_num_layers": 1}
    return settings
