# pyright: reportMissingImports=false
"""AgileRL: PPO flat and recurrent, DQN, Rainbow with n steps and priorities, TD3, MADDPG."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from . import Trainer

_OFF_POLICY = {"batch_size": 64}
_NETWORK = {"latent_dim": 32, "encoder_config": {"hidden_size": [64]}, "head_config": {"hidden_size": [32]}}


def trainers() -> list[Trainer]:
    """Every trainer of AgileRL that stores steps in a buffer of `components`."""
    return [
        Trainer("PPO", "CartPole, 40,000 steps", partial(_on_policy, recurrent=False, steps=40_000)),
        Trainer("recurrent PPO", "CartPole, 40,000 steps", partial(_on_policy, recurrent=True, steps=40_000)),
        Trainer("DQN", "CartPole, 30,000 steps", _dqn),
        Trainer("Rainbow with 3 steps and priorities", "CartPole, 30,000 steps", _rainbow),
        Trainer("TD3", "Pendulum, 16,000 steps", _td3),
        Trainer("MADDPG", "speaker and listener, 12,000 steps", _maddpg),
    ]


def _environments(name: str, num_envs: int, seed: int) -> Any:
    env = import_module("agilerl.utils.utils").make_vect_envs(name, num_envs=num_envs)
    env.reset(seed=seed)
    env.action_space.seed(seed)
    return env


def _settings(steps: int) -> dict[str, Any]:
    """Eight evaluations."""
    return {"max_steps": steps, "evo_steps": steps // 8, "eval_loop": 5, "wb": False, "verbose": False}


def _reached(population: Any) -> float:
    """The mean of the last four evaluations."""
    return float(np.mean(population[0].fitness[-4:]))


def _on_policy(prefix: str, seed: int, *, recurrent: bool, steps: int) -> float:
    env = _environments("CartPole-v1", 8, seed)
    options: dict[str, Any] = {"num_envs": 8, "learn_step": 1024, "lr": 1e-3, "update_epochs": 4}
    if recurrent:
        options |= {"recurrent": True, "max_seq_len": 16, "batch_size": 16}
        options["net_config"] = {"encoder_config": {"hidden_state_size": 32}}
    agent = import_module(f"{prefix}agilerl.algorithms.ppo").PPO(
        env.single_observation_space, env.single_action_space, **options
    )
    train = import_module("agilerl.training.train_on_policy").train_on_policy
    population, _ = train(env, "CartPole-v1", "PPO", [agent], **_settings(steps))
    env.close()
    return _reached(population)


def _off_policy(env: Any, agent: Any, steps: int, memory: Any, n_step_memory: Any = None) -> float:
    train = import_module("agilerl.training.train_off_policy").train_off_policy
    population, _ = train(
        env, "", type(agent).__name__, [agent], memory, n_step_memory=n_step_memory, **_settings(steps)
    )
    env.close()
    return _reached(population)


def _agent(name: str, env: Any, **options: Any) -> Any:
    kind = getattr(import_module("agilerl.algorithms"), name)
    spaces = env.single_observation_space, env.single_action_space
    return kind(*spaces, **_OFF_POLICY, net_config=_NETWORK, **options)


def _dqn(prefix: str, seed: int) -> float:
    buffers, env = import_module(f"{prefix}agilerl.components.replay_buffer"), _environments("CartPole-v1", 4, seed)
    return _off_policy(env, _agent("DQN", env, lr=1e-3, learn_step=4), 30_000, buffers.ReplayBuffer(10_000))


def _rainbow(prefix: str, seed: int) -> float:
    buffers, env = import_module(f"{prefix}agilerl.components.replay_buffer"), _environments("CartPole-v1", 4, seed)
    agent = _agent("RainbowDQN", env, lr=1e-3, v_min=0, v_max=100, n_step=3, learn_step=4)
    memory = buffers.PrioritizedReplayBuffer(10_000)
    return _off_policy(env, agent, 30_000, memory, buffers.MultiStepReplayBuffer(10_000, n_step=3, gamma=0.99))


def _td3(prefix: str, seed: int) -> float:
    buffers, env = import_module(f"{prefix}agilerl.components.replay_buffer"), _environments("Pendulum-v1", 4, seed)
    agent = _agent("TD3", env, lr_actor=1e-3, lr_critic=1e-3, learn_step=2, vect_noise_dim=4)
    return _off_policy(env, agent, 16_000, buffers.ReplayBuffer(20_000))


def _maddpg(prefix: str, seed: int) -> float:
    scenario: Any = import_module("mpe2.simple_speaker_listener_v4")
    vector = import_module("agilerl.vector.pz_async_vec_env").AsyncPettingZooVecEnv
    env = vector([lambda: scenario.parallel_env(continuous_actions=True)] * 4)
    env.reset(seed=seed)
    spaces = [[part(agent) for agent in env.agents] for part in (env.single_observation_space, env.single_action_space)]
    agent = import_module("agilerl.algorithms").MADDPG(
        *spaces, agent_ids=env.agents, vect_noise_dim=4, batch_size=64, learn_step=20, net_config=_NETWORK
    )
    memory = import_module(f"{prefix}agilerl.components.replay_buffer").ReplayBuffer(10_000)
    train = import_module("agilerl.training.train_multi_agent_off_policy").train_multi_agent_off_policy
    population, _ = train(env, "", "MADDPG", [agent], memory, **_settings(12_000))
    env.close()
    return _reached(population)
