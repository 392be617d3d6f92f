# pyright: reportMissingImports=false
"""rsl_rl: PPO with feed-forward and recurrent networks, and distillation, with their runners."""

from __future__ import annotations

import copy
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

import torch
from tensordict import TensorDict

from relive.compat import patch, unpatch

from . import Trainer

_ITERATIONS, _DISTILLATION_ITERATIONS = 60, 30


def trainers() -> list[Trainer]:
    """Return PPO with and without recurrent networks, and distillation of a trained teacher."""
    task = f"pucks on a plane, {_ITERATIONS} iterations"
    return [
        Trainer("PPO", task, partial(_ppo, recurrent=False)),
        Trainer("recurrent PPO", task, partial(_ppo, recurrent=True)),
        Trainer("Distillation", f"the same, {_DISTILLATION_ITERATIONS} iterations", _distillation),
    ]


def _world(num_envs: int, seed: int) -> Any:
    """Make a `VecEnv` of pucks that an action pushes, rewarded near the origin, with episodes of 12 steps."""
    base: Any = import_module("rsl_rl.env").VecEnv

    class Pucks(base):
        def __init__(self) -> None:
            self.num_envs, self.num_actions, self.max_episode_length = num_envs, 2, 12
            self.device, self.cfg = "cpu", {}
            self.random = torch.Generator().manual_seed(seed)
            self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
            self.position, self.speed = torch.zeros(2, num_envs, 2)
            self.restart(torch.ones(num_envs, dtype=torch.bool))

        def restart(self, is_restarted: torch.Tensor) -> None:
            self.position[is_restarted] = 4 * torch.rand(int(is_restarted.sum()), 2, generator=self.random) - 2
            self.speed[is_restarted] = 0
            self.episode_length_buf[is_restarted] = 0

        def get_observations(self) -> TensorDict:
            return TensorDict({"policy": torch.cat([self.position, self.speed], -1)}, [num_envs])

        def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
            self.speed += 0.5 * actions.clamp(-1, 1)
            self.position += 0.5 * self.speed
            self.episode_length_buf += 1
            distance = self.position.norm(dim=-1)
            is_off, reward = distance > 4, (1 - distance / 4).clamp(min=0)
            time_outs = (self.episode_length_buf >= self.max_episode_length) & ~is_off
            self.restart(is_off | time_outs)
            return self.get_observations(), reward, (is_off | time_outs).long(), {"time_outs": time_outs}

    return Pucks()


def _settings(recurrent: bool) -> dict[str, Any]:
    network: dict[str, Any] = {"class_name": "MLPModel", "hidden_dims": [32], "activation": "elu"}
    if recurrent:
        network |= {"class_name": "RNNModel", "rnn_type": "lstm", "rnn_hidden_dim": 8, "rnn_num_layers": 1}
    actor = {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}}
    return {
        "num_steps_per_env": 16, "save_interval": 1_000, "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": actor, "critic": network,
        "algorithm": {"class_name": "PPO", "learning_rate": 3e-3, "entropy_coef": 0.0},
    }  # fmt: skip


def _reward(runner: Any) -> float:
    """Return the mean reward per step of the policy without noise, in new environments."""
    world, total, policy = _world(16, 1_000), 0.0, runner.get_inference_policy()
    ended = torch.ones(world.num_envs, dtype=torch.long)
    with torch.inference_mode():
        for _ in range(480):
            policy.reset(ended)
            _, reward, ended, _ = world.step(policy(world.get_observations()))
            total += float(reward.mean())
    return total / 480


def _ppo(seed: int, *, recurrent: bool) -> float:
    runners = import_module("rsl_rl.runners")
    with redirect_stdout(StringIO()):
        runner = runners.OnPolicyRunner(_world(16, seed), _settings(recurrent))
        runner.learn(_ITERATIONS)
    return _reward(runner)


def _distillation(seed: int) -> float:
    runners = import_module("rsl_rl.runners")
    settings = copy.deepcopy(_settings(recurrent=False))
    settings["student"], settings["teacher"] = settings.pop("actor"), copy.deepcopy(settings.pop("critic"))
    settings["teacher"]["distribution_cfg"] = dict(settings["student"]["distribution_cfg"])
    settings["obs_groups"] = {"student": ["policy"], "teacher": ["policy"]}
    settings["algorithm"] = {"class_name": "Distillation", "gradient_length": 4, "num_learning_epochs": 2}
    with redirect_stdout(StringIO()):
        teacher = _teacher(seed)
        runner = runners.DistillationRunner(_world(16, seed), settings)
        runner.alg.teacher.load_state_dict(teacher.alg.actor.state_dict())
        runner.alg.teacher_loaded = True
        runner.learn(_DISTILLATION_ITERATIONS)
    return _reward(runner)


def _teacher(seed: int) -> Any:
    """Return the teacher, trained by rsl_rl on its own storage; both sides use the same teacher."""
    runners, ppo = import_module("rsl_rl.runners"), import_module("rsl_rl.algorithms.ppo")
    is_patched = ppo.RolloutStorage.__module__.startswith("relive.")
    unpatch("rsl_rl")
    teacher = runners.OnPolicyRunner(_world(16, seed), _settings(recurrent=False))
    teacher.learn(_ITERATIONS)
    if is_patched:
        patch("rsl_rl")
    return teacher
