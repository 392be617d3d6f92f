# pyright: reportMissingImports=false
"""AgileRL: PPO flat and recurrent, DQN, Rainbow with n steps and priorities, TD3, MADDPG."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from . import Trainer

_OFF_POLICY = {"batch_size": 64}
_NETWORK = {"latent_dim": 32, "encoder_config": {"hidden_size": [64]}, "head_config": {"hidden_size": [32]}}


def trainers() -> list[Trainer]:
    """Return every trainer of AgileRL that stores steps in a buffer of `components`."""
    return [
        Trainer("PPO", "CartPole, 40,000 steps", partial(_on_policy, recurrent=False, steps=40_000)),
        Trainer("recurrent PPO", "CartPole, 40,000 steps", partial(_on_policy, recurrent=True, steps=40_000)),
        Trainer("DQN", "CartPole, 30,000 steps", _dqn),
        Trainer("Rainbow with 3 steps and priorities", "the action that is shown, 10,000 steps", _rainbow),
        Trainer("TD3", "the number that is shown, 6,000 steps", _td3),
        Trainer("MADDPG", "two agents, the number that is shown to each, 6,000 steps", _maddpg),
    ]


class ShownAction(gymnasium.Env[np.ndarray, Any]):
    """An environment that rewards the action shown by the observation with 1; episodes have 8 steps."""

    observation_space, action_space = spaces.Box(0, 1, (4,), np.float32), spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.make_obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        reward = self.compute_reward(action)
        return self.make_obs(), reward, False, self.time == 8, {}

    def make_obs(self) -> np.ndarray:
        self.best_action = self.np_random.integers(4)
        return np.eye(4, dtype=np.float32)[self.best_action]

    def compute_reward(self, action: Any) -> float:
        return float(action == self.best_action)


class ShownNumber(ShownAction):
    """An environment whose reward is minus the distance between the action and the observed number."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-1, 1, (1,), np.float32)

    def make_obs(self) -> np.ndarray:
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.best_action = obs[0]
        return obs

    def compute_reward(self, action: Any) -> float:
        return -abs(float(np.ravel(action)[0] - self.best_action))


def _environments(env: str | type[ShownAction], num_envs: int, seed: int) -> Any:
    make = {"env_name" if isinstance(env, str) else "make_env": env}
    envs = import_module("agilerl.utils.utils").make_vect_envs(num_envs=num_envs, should_async_vector=False, **make)
    envs.reset(seed=seed)
    envs.action_space.seed(seed)
    return envs


def _settings(steps: int) -> dict[str, Any]:
    """Return the settings of a training with eight evaluations."""
    return {"max_steps": steps, "evo_steps": steps // 8, "eval_loop": 5, "wb": False, "verbose": False}


def _final_score(population: Any) -> float:
    """Return the mean score of the last four evaluations."""
    return float(np.mean(population[0].fitness[-4:]))


def _on_policy(seed: int, *, recurrent: bool, steps: int) -> float:
    env = _environments("CartPole-v1", 8, seed)
    options: dict[str, Any] = {"num_envs": 8, "learn_step": 1024, "lr": 1e-3, "update_epochs": 4}
    if recurrent:
        options |= {"recurrent": True, "max_seq_len": 16, "batch_size": 16}
        options["net_config"] = {"encoder_config": {"hidden_state_size": 32}}
    agent = import_module("agilerl.algorithms.ppo").PPO(
        env.single_observation_space, env.single_action_space, **options
    )
    train = import_module("agilerl.training.train_on_policy").train_on_policy
    population, _ = train(env, "CartPole-v1", "PPO", [agent], **_settings(steps))
    env.close()
    return _final_score(population)


def _off_policy(env: Any, agent: Any, steps: int, memory: Any, n_step_memory: Any = None) -> float:
    train = import_module("agilerl.training.train_off_policy").train_off_policy
    population, _ = train(
        env, "", type(agent).__name__, [agent], memory, n_step_memory=n_step_memory, **_settings(steps)
    )
    env.close()
    return _final_score(population)


def _agent(name: str, env: Any, **options: Any) -> Any:
    kind = getattr(import_module("agilerl.algorithms"), name)
    spaces = env.single_observation_space, env.single_action_space
    return kind(*spaces, **_OFF_POLICY, net_config=_NETWORK, **options)


def _dqn(seed: int) -> float:
    buffers, env = import_module("agilerl.components.replay_buffer"), _environments("CartPole-v1", 4, seed)
    return _off_policy(env, _agent("DQN", env, lr=1e-3, learn_step=4), 30_000, buffers.ReplayBuffer(10_000))


def _rainbow(seed: int) -> float:
    buffers, env = import_module("agilerl.components.replay_buffer"), _environments(ShownAction, 4, seed)
    agent = _agent("RainbowDQN", env, lr=1e-3, v_min=0, v_max=8, gamma=0.5, tau=0.02, n_step=3, learn_step=4)
    memory = buffers.PrioritizedReplayBuffer(10_000)
    return _off_policy(env, agent, 10_000, memory, buffers.MultiStepReplayBuffer(10_000, n_step=3, gamma=0.5))


def _td3(seed: int) -> float:
    buffers, env = import_module("agilerl.components.replay_buffer"), _environments(ShownNumber, 4, seed)
    agent = _agent("TD3", env, lr_actor=1e-3, lr_critic=1e-3, gamma=0.5, learn_step=4, vect_noise_dim=4)
    return _off_policy(env, agent, 6_000, buffers.ReplayBuffer(20_000))


def _pair() -> Any:
    """Make an environment of two agents with independent tasks."""
    base: Any = import_module("pettingzoo").ParallelEnv

    class Pair(base):
        metadata: ClassVar[dict[str, Any]] = {"name": "pair", "render_modes": []}
        possible_agents: ClassVar[list[str]] = ["agent_0", "agent_1"]

        def __init__(self) -> None:
            self.worlds = {agent: ShownNumber() for agent in self.possible_agents}

        def observation_space(self, agent: str) -> spaces.Space[Any]:
            return ShownNumber.observation_space

        def action_space(self, agent: str) -> spaces.Space[Any]:
            return ShownNumber.action_space

        def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], ...]:
            self.agents = list(self.possible_agents)
            seeds = [None if seed is None else seed + number for number in range(len(self.agents))]
            return _by_agent(
                {agent: world.reset(seed=seed) for (agent, world), seed in zip(self.worlds.items(), seeds, strict=True)}
            )

        def step(self, actions: dict[str, np.ndarray]) -> tuple[dict[str, Any], ...]:
            return _by_agent({agent: self.worlds[agent].step(action) for agent, action in actions.items()})

    return Pair()


def _by_agent(values_by_agent: dict[str, tuple[Any, ...]]) -> tuple[dict[str, Any], ...]:
    """Return one dict per kind of value, with an entry for each agent."""
    return tuple(
        dict(zip(values_by_agent, values, strict=True)) for values in zip(*values_by_agent.values(), strict=True)
    )


def _maddpg(seed: int) -> float:
    vector = import_module("agilerl.vector.pz_async_vec_env").AsyncPettingZooVecEnv
    env = vector([_pair] * 4)
    env.reset(seed=seed)
    agent_spaces = [
        [part(agent) for agent in env.agents] for part in (env.single_observation_space, env.single_action_space)
    ]
    agent = import_module("agilerl.algorithms").MADDPG(
        *agent_spaces, agent_ids=env.agents, vect_noise_dim=4, batch_size=64, learn_step=4, gamma=0.5, lr_actor=1e-3,
        lr_critic=1e-3, net_config=_NETWORK,
    )  # fmt: skip
    memory = import_module("agilerl.components.replay_buffer").ReplayBuffer(10_000)
    train = import_module("agilerl.training.train_multi_agent_off_policy").train_multi_agent_off_policy
    population, _ = train(env, "", "MADDPG", [agent], memory, **_settings(6_000))
    env.close()
    return _final_score(population)
