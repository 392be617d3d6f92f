"""Proximal policy optimisation in one file, for discrete and continuous actions, with truncations handled correctly.

    python examples/ppo.py                                            # CartPole-v1, under a minute
    python examples/ppo.py --env-id Pendulum-v1 --plot pendulum.png   # continuous, under a minute

`RolloutBuffer.for_env` reads the autoreset mode from the environment, so the loop has no `done`: no minibatch contains
a dummy step, and a truncated episode bootstraps from its true final observation.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from relive import EpisodeStats, RolloutBuffer


@dataclass(frozen=True)
class Settings:
    num_envs: int = 8
    num_steps: int = 64
    total_steps: int = 150_000
    gamma: float = 0.98
    lam: float = 0.9
    epochs: int = 8
    batch_size: int = 256
    learning_rate: float = 1e-3
    clip: float = 0.2
    reward_scale: float = 1.0


DISCRETE = Settings()
# Pendulum pays about -6 per step and never terminates: a shorter horizon and smaller targets help the critic.
CONTINUOUS = Settings(num_steps=256, total_steps=200_000, gamma=0.9, lam=0.95, epochs=10, reward_scale=0.1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO on a Gymnasium environment.")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=None, help="environment steps; the settings' own by default")
    parser.add_argument("--autoreset", default="NEXT_STEP", choices=["NEXT_STEP", "SAME_STEP"], help="either works")
    parser.add_argument("--plot", type=Path, default=None, help="save the learning curve here (needs matplotlib)")
    return parser.parse_args()


def mlp(num_inputs: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(num_inputs, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """A policy and a critic. Continuous actions are in units of the action space: -1 is its low, 1 its high."""

    def __init__(self, obs_space: gym.Space, action_space: gym.Space) -> None:
        super().__init__()
        if not isinstance(obs_space, gym.spaces.Box):
            raise TypeError(f"obs_space: expected a Box, got {obs_space}. See ppo_dict_obs.py for others.")
        num_inputs = int(np.prod(obs_space.shape))
        self.critic = mlp(num_inputs, 1, last_gain=1.0)
        if isinstance(action_space, gym.spaces.Discrete):
            self.actor = mlp(num_inputs, int(action_space.n), last_gain=0.01)
            self.log_std = None
        else:
            size = int(np.prod(action_space.shape or ()))
            self.actor = mlp(num_inputs, size, last_gain=0.01)
            self.log_std = nn.Parameter(torch.zeros(size))

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def policy(self, obs: Tensor) -> Distribution:
        output = self.actor(obs)
        if self.log_std is None:
            return Categorical(logits=output)
        return Independent(Normal(output, self.log_std.exp()), 1)


def to_env(action: Tensor, space: gym.Space) -> np.ndarray:
    """Scale the policy's action for the environment; the buffer stores the unscaled action, for PPO's ratio."""
    if not isinstance(space, gym.spaces.Box):
        return action.numpy()
    return space.low + (action.clamp(-1.0, 1.0).numpy() + 1.0) / 2.0 * (space.high - space.low)


def train(env_id: str, seed: int, total_steps: int | None, autoreset: str = "NEXT_STEP") -> list[tuple[int, float]]:
    """Train and return the episodes: (step at which it ended, return)."""
    discrete = isinstance(gym.make(env_id).action_space, gym.spaces.Discrete)
    settings = DISCRETE if discrete else CONTINUOUS
    env = gym.make_vec(env_id, settings.num_envs, "sync", vector_kwargs={"autoreset_mode": AutoresetMode[autoreset]})
    total_steps = total_steps or settings.total_steps
    torch.manual_seed(seed)
    agent = Agent(env.single_observation_space, env.single_action_space)
    optimizer = torch.optim.Adam(agent.parameters(), settings.learning_rate, eps=1e-5)
    stats = EpisodeStats(settings.num_envs, window=total_steps)  # keeps every episode
    rollout = RolloutBuffer.for_env(env, settings.num_steps, stats=stats, seed=seed)

    obs, _ = env.reset(seed=seed)
    num_steps = 0
    while num_steps < total_steps:
        # Act.
        rollout.clear()
        while not rollout.is_full:
            with torch.no_grad():
                policy, value = agent.policy(torch.as_tensor(obs)), agent.value(torch.as_tensor(obs))
                action = policy.sample()
                log_prob = policy.log_prob(action)
            next_obs, reward, terminated, truncated, info = env.step(to_env(action, env.single_action_space))
            step = (next_obs, reward * settings.reward_scale, terminated, truncated, info)
            rollout.add_step(obs, action, step, value=value, log_prob=log_prob)
            obs = next_obs
        num_steps += len(rollout)

        # Compute advantages. Under NEXT_STEP the final observations are rows of the rollout and final_obs is empty.
        with torch.no_grad():
            last_value, final_value = agent.value(torch.as_tensor(obs)), agent.value(rollout.final_obs)
        rollout.compute_advantage(last_value, final_value=final_value, gamma=settings.gamma, lam=settings.lam)

        # Learn.
        optimizer.param_groups[0]["lr"] = settings.learning_rate * max(1.0 - num_steps / total_steps, 0.05)
        for batch in rollout.minibatches(settings.batch_size, epochs=settings.epochs):
            policy = agent.policy(batch["obs"])
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
            advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
            clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
            policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            value_loss = (agent.value(batch["obs"]) - batch["return"]).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        recent = stats.episodes()["return"][-50:] / settings.reward_scale
        if len(recent):
            print(f"{num_steps:9,} steps   mean return of the last {len(recent):2} episodes {recent.mean():8.1f}")
    env.close()
    episodes = stats.episodes()
    returns = episodes["return"] / settings.reward_scale
    return list(zip(episodes["step"].tolist(), returns.tolist(), strict=True))


def plot(path: Path, episodes: list[tuple[int, float]], title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only --plot needs it)

    steps, returns = np.array(episodes).T
    window = np.ones(min(50, len(returns)))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="environment steps", ylabel="return")
    axes.plot(steps, returns, ".", alpha=0.3, label="one episode")
    mean = np.convolve(returns, window, "valid") / len(window)
    axes.plot(steps[len(window) - 1 :], mean, color="tab:blue", linewidth=2, label=f"mean of {len(window)}")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    args = arguments()
    torch.set_num_threads(1)  # small networks run fastest on one core
    history = train(args.env_id, args.seed, args.total_steps, args.autoreset)
    if args.plot:
        plot(args.plot, history, f"PPO on {args.env_id}, seed {args.seed}")
