# pyright: reportMissingImports=false
"""Stable-Baselines3 with hindsight, and sb3-contrib's algorithms; `benchmarks.training` has PPO, DQN and SAC."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from . import Trainer

_SMALL = {"policy_kwargs": {"net_arch": [64, 64]}}
_REPLAY = {"learning_starts": 500, "buffer_size": 20_000}


def trainers() -> list[Trainer]:
    """Return hindsight, and every algorithm of sb3-contrib that has a buffer."""
    dqn = {"policy_kwargs": {"net_arch": [64, 64], "n_quantiles": 25}, "train_freq": 4, "gradient_steps": 2}
    dqn |= {"learning_rate": 1e-3, "target_update_interval": 250, "exploration_fraction": 0.3}
    memory = {"policy_kwargs": {"net_arch": [64], "lstm_hidden_size": 32}, "n_epochs": 5}
    return [
        Trainer("DQN with HER", "12 bits to flip, 8,000 steps", _hindsight),
        Trainer("MaskablePPO", "invalid actions among 40, 12,000 steps", _maskable),
        Trainer(
            "RecurrentPPO",
            "CartPole, 16,000 steps",
            partial(_contrib, "RecurrentPPO", "MlpLstmPolicy", 16_000, **memory),
        ),
        Trainer("TRPO", "CartPole, 16,000 steps", partial(_contrib, "TRPO", "MlpPolicy", 16_000)),
        Trainer("QRDQN", "CartPole, 10,000 steps", partial(_contrib, "QRDQN", "MlpPolicy", 10_000, **_REPLAY, **dqn)),
        Trainer("TQC", "Pendulum, 3,000 steps", partial(_contrib, "TQC", "MlpPolicy", 3_000, **_REPLAY, **_SMALL)),
        Trainer(
            "CrossQ", "Pendulum, 3,000 steps", partial(_contrib, "CrossQ", "MlpPolicy", 3_000, **_REPLAY, **_SMALL)
        ),
    ]


def _learn(model: Any, steps: int) -> float:
    """Let a model learn and return the mean return of the last 20 episodes."""
    model.learn(steps)
    return float(np.mean([episode["r"] for episode in list(model.ep_info_buffer)[-20:]]))


def _hindsight(seed: int) -> float:
    flips = import_module("stable_baselines3.common.envs").BitFlippingEnv(n_bits=12, continuous=False, max_steps=12)
    model = import_module("stable_baselines3").DQN(
        "MultiInputPolicy", flips, seed=seed, device="cpu", learning_rate=1e-3, learning_starts=200, gamma=0.95,
        train_freq=2, exploration_fraction=0.5, target_update_interval=200, buffer_size=10_000,
        replay_buffer_class=import_module("stable_baselines3.her").HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"}, **_SMALL,
    )  # fmt: skip
    return _learn(model, 8_000)


def _maskable(seed: int) -> float:
    envs = import_module("sb3_contrib.common.envs")
    env = envs.InvalidActionEnvDiscrete(dim=40, n_invalid_actions=20)
    model = import_module("sb3_contrib").MaskablePPO("MlpPolicy", env, seed=seed, device="cpu", n_steps=256, gamma=0.4)
    return _learn(model, 12_000)


def _contrib(name: str, policy: str, steps: int, seed: int, **options: Any) -> float:
    task = "Pendulum-v1" if name in ("TQC", "CrossQ") else "CartPole-v1"
    on_policy = name in ("RecurrentPPO", "TRPO")
    make = import_module("stable_baselines3.common.env_util").make_vec_env
    env = make(task, n_envs=4 if on_policy else 1, seed=seed)
    settings = {"n_steps": 128, "batch_size": 128, **_SMALL} if on_policy else {}
    algorithm = getattr(import_module("sb3_contrib"), name)
    return _learn(algorithm(policy, env, seed=seed, device="cpu", **settings | options), steps)
