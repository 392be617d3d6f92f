# pyright: reportMissingImports=false
"""ApexRL: PPO, DQN and SAC with their runners."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

import gymnasium
import torch

from . import Trainer

_CPU = torch.device("cpu")
_OFF_POLICY = {"batch_size": 64, "buffer_size": 10_000, "learning_starts": 500, "train_freq": 1, "gradient_steps": 1}
_OFF_POLICY |= {"log_interval": 0, "save_interval": 0}


def trainers() -> list[Trainer]:
    """Return every algorithm that has a runner for one agent."""
    steps = {"ppo": 30_720, "dqn": 12_000, "sac": 8_000}
    tasks = {"ppo": "CartPole", "dqn": "CartPole", "sac": "Pendulum"}
    return [
        Trainer(name.upper(), f"{tasks[name]}, {count:,} steps", partial(_train, name, count))
        for name, count in steps.items()
    ]


def _train(name: str, steps: int, seed: int) -> float:
    with redirect_stdout(StringIO()):
        runner = {"ppo": _ppo, "dqn": _dqn, "sac": _sac}[name](seed)
        if name == "ppo":
            runner.learn(num_iterations=steps // 512)
        else:
            runner.learn(total_timesteps=steps)
        # ApexRL's PPO counts the rewards of one rollout only, so the policy is evaluated for every algorithm.
        return runner.eval(num_episodes=20)["eval/mean_reward"]


def _vector(task: str, num_envs: int, seed: int) -> Any:
    """Make ApexRL's vector environment with new memory for every step, so that no observation is overwritten."""
    wrapper = import_module("apexrl.envs.gym_wrapper")
    kind: Any = wrapper.GymVecEnvContinuous if task == "Pendulum-v1" else wrapper.GymVecEnv

    class FreshObservations(kind):
        def step(self, actions: torch.Tensor) -> Any:
            self.obs_buf = self.obs_buf.clone()
            return super().step(actions)

    return FreshObservations([_seeded(task, 100 * seed + number) for number in range(num_envs)], device="cpu")


def _seeded(task: str, seed: int) -> Callable[[], Any]:
    def make() -> Any:
        env = gymnasium.make(task)
        env.reset(seed=seed)
        return env

    return make


def _ppo(seed: int) -> Any:
    algorithm, models = import_module("apexrl.algorithms.ppo"), import_module("apexrl.models")
    settings = algorithm.PPOConfig(
        num_steps=64, num_epochs=6, minibatch_size=128, learning_rate=1e-3, learning_rate_schedule="constant",
        max_iterations=60, device="cpu",
    )  # fmt: skip
    return import_module("apexrl.agent.on_policy_runner").OnPolicyRunner(
        env=_vector("CartPole-v1", 8, seed),
        cfg=settings,
        actor_class=models.MLPDiscreteActor,
        critic_class=models.MLPCritic,
    )


def _dqn(seed: int) -> Any:
    algorithm, models = import_module("apexrl.algorithms.dqn"), import_module("apexrl.models")
    settings = algorithm.DQNConfig(
        **_OFF_POLICY, target_update_interval=100, epsilon_decay_steps=4_000, learning_rate=1e-3
    )
    return import_module("apexrl.agent.off_policy_runner").OffPolicyRunner(
        env=_vector("CartPole-v1", 4, seed), cfg=settings, q_network_class=models.MLPQNetwork, device=_CPU
    )


def _sac(seed: int) -> Any:
    algorithm, env = import_module("apexrl.algorithms.sac"), _vector("Pendulum-v1", 4, seed)
    settings = algorithm.SACConfig(
        **_OFF_POLICY | {"gradient_steps": 4}, actor_learning_rate=1e-3, critic_learning_rate=1e-3,
        actor_hidden_dims=[64, 64], critic_hidden_dims=[64, 64], device="cpu",
    )  # fmt: skip
    agent = algorithm.SAC(env=env, cfg=settings, device=_CPU)
    return import_module("apexrl.agent.off_policy_runner").OffPolicyRunner(env=env, agent=agent, device=_CPU)
