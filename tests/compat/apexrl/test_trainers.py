"""ApexRL's PPO, DQN and SAC learn a simple environment with our buffers after `patch`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from relive.compat import patch

REASON = "ApexRL is in no registry: put its src on the path"


class Copying(gymnasium.Env[np.ndarray, Any]):
    """Environment that rewards the action shown by the observation; episodes have 8 steps."""

    def __init__(self, continuous: bool = False) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if continuous else spaces.Discrete(2)
        self.continuous = continuous

    def _seen(self) -> np.ndarray:
        self.wanted = self.np_random.integers(2)
        return np.array([self.wanted, 1 - self.wanted], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        target = 2.0 * self.wanted - 1 if self.continuous else self.wanted
        given = float(np.ravel(action)[0])
        self.time += 1
        return self._seen(), -abs(given - target), False, self.time == 8, {}


def make_vector_env(continuous: bool = False) -> Any:
    """Make ApexRL's vector environment with copied observations; by itself it overwrites those that it has returned."""
    wrapper = pytest.importorskip("apexrl.envs.gym_wrapper", reason=REASON)

    class Copied(wrapper.GymVecEnvContinuous if continuous else wrapper.GymVecEnv):  # pyright: ignore
        def step(self, actions: torch.Tensor) -> Any:
            self.obs_buf = self.obs_buf.clone()
            return super().step(actions)

    return Copied([lambda: Copying(continuous)] * 4, device="cpu")


def make_runner(name: str) -> Any:
    models, cpu = importlib.import_module("apexrl.models"), torch.device("cpu")
    settings, agents = (importlib.import_module(f"apexrl.{x}") for x in (f"algorithms.{name}", "agent"))
    if name == "ppo":
        config = settings.PPOConfig(
            num_steps=32, num_epochs=4, minibatch_size=32, learning_rate=3e-3, learning_rate_schedule="constant",
            device="cpu",
        )  # fmt: skip
        return agents.OnPolicyRunner(
            env=make_vector_env(),
            cfg=config,
            actor_class=models.MLPDiscreteActor,
            critic_class=models.MLPCritic,
            device=cpu,
        )
    shared = {"batch_size": 32, "buffer_size": 2000, "learning_starts": 100, "train_freq": 1, "gradient_steps": 1}
    shared |= {"log_interval": 0, "save_interval": 0, "gamma": 0.5}
    if name == "dqn":
        config = settings.DQNConfig(**shared, target_update_interval=20, epsilon_decay_steps=500, learning_rate=3e-3)
        return agents.OffPolicyRunner(env=make_vector_env(), cfg=config, q_network_class=models.MLPQNetwork, device=cpu)
    world = make_vector_env(continuous=True)
    learner = settings.SAC(env=world, cfg=settings.SACConfig(**shared, device="cpu"), device=cpu)
    return agents.OffPolicyRunner(env=world, agent=learner, device=cpu)


# The source tree of ApexRL has no version, so `patch` warns.
@pytest.mark.filterwarnings("ignore:patch\\('apexrl'\\)")
@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_its_trainers_learn_save_and_load_on_our_buffers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pytest.importorskip("apexrl.agent.off_policy_runner", reason=REASON)
    with patch("apexrl"):
        trainer = make_runner(name)
    buffer = trainer.agent.rollout_buffer if name == "ppo" else trainer.agent.replay_buffer
    assert type(buffer).__module__.startswith("relive.compat.apexrl")
    if name == "ppo":
        trainer.learn(num_iterations=25)
    else:
        trainer.learn(total_timesteps=2000)
    trainer.agent.save(str(tmp_path / "agent.pt"))
    trainer.agent.load(str(tmp_path / "agent.pt"))
    assert len(buffer) == (4 * 32 if name == "ppo" else 2000)
    actual = trainer.agent.eval(num_episodes=8) if name != "ppo" else trainer.eval(num_episodes=8)
    # Random actions score −4 or −8.
    assert next(value for key, value in actual.items() if "mean_reward" in key) > -2.5
