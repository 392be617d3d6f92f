"""PPO with a Dict observation: a picture of the room and a vector with the goal's place. Neither suffices alone.

    python examples/ppo_dict_obs.py

Nothing about the buffer changes: its schema is read from the Dict space, `obs` is passed as the environment returns it,
and a minibatch's `obs` is a nested TensorDict with the same keys.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from torch import Tensor, nn
from torch.distributions import Categorical

from relive import EpisodeStats, RolloutBuffer

SIZE = 6
NUM_ENVS, NUM_STEPS, TOTAL_STEPS, TIME_LIMIT = 16, 64, 200_000, 30
GAMMA, LAM, EPOCHS, BATCH_SIZE, LEARNING_RATE, CLIP, ENTROPY = 0.95, 0.95, 4, 256, 1e-3, 0.2, 0.01
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])

Obs = dict[str, Any]


class Room(gym.Env[Obs, np.int64]):
    """Walk to the goal around pillars. The picture shows where you and the pillars are, the vector where the goal is.

    A step costs 0.05, the goal pays 1 and terminates; a time limit around the room truncates.
    """

    observation_space = gym.spaces.Dict(
        {"image": gym.spaces.Box(0, 255, (2, SIZE, SIZE), np.uint8), "goal": gym.spaces.Box(0.0, 1.0, (2,), np.float32)}
    )
    action_space = gym.spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        # Pillars on odd places only: every free place can be reached.
        self.pillars = np.zeros((SIZE, SIZE), dtype=np.bool_)
        self.pillars[1::2, 1::2] = self.np_random.random((SIZE // 2, SIZE // 2)) < 0.5
        free = np.argwhere(~self.pillars)
        self.place, self.goal = free[self.np_random.choice(len(free), 2, replace=False)]
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        target = np.clip(self.place + MOVES[action], 0, SIZE - 1)
        if not self.pillars[tuple(target)]:
            self.place = target
        arrived = bool((self.place == self.goal).all())
        return self._observe(), 1.0 if arrived else -0.05, arrived, False, {}

    def _observe(self) -> Obs:
        image = np.zeros((2, SIZE, SIZE), dtype=np.uint8)
        image[0][tuple(self.place)] = 255
        image[1][self.pillars] = 255
        return {"image": image, "goal": (self.goal / (SIZE - 1)).astype(np.float32)}


class Agent(nn.Module):
    """One network that reads both parts, with a policy and a critic on top."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * SIZE**2, 64))
        self.goal = nn.Linear(2, 64)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.actor, self.critic = nn.Linear(128, len(MOVES)), nn.Linear(128, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, obs: Any) -> tuple[Categorical, Tensor]:
        """Return the policy and the value [B]; `obs` is a dict or a TensorDict."""
        parts = [self.image(obs["image"] / 255.0), self.goal(obs["goal"])]
        hidden = self.body(torch.cat(parts, -1))
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


def tensors(obs: Obs) -> dict[str, Tensor]:
    return {name: torch.as_tensor(part) for name, part in obs.items()}


def train(seed: int, total_steps: int) -> list[float]:
    """Train and return the returns of the episodes, in the order in which they ended."""
    torch.manual_seed(seed)
    env = SyncVectorEnv([lambda: TimeLimit(Room(), TIME_LIMIT)] * NUM_ENVS)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE)
    stats = EpisodeStats(NUM_ENVS, window=total_steps)  # keeps every episode
    rollout = RolloutBuffer.for_env(env, NUM_STEPS, stats=stats, seed=seed)

    obs, _ = env.reset(seed=seed)
    num_steps = 0
    while num_steps < total_steps:
        # Act.
        rollout.clear()
        while not rollout.is_full:
            with torch.no_grad():
                policy, value = agent(tensors(obs))
                action = policy.sample()
                log_prob = policy.log_prob(action)
            step = env.step(action.numpy())
            rollout.add_step(obs, action, step, value=value, log_prob=log_prob)
            obs = step[0]
        num_steps += len(rollout)

        # Compute advantages. This environment resets at the next step, so every final observation is in the rollout.
        with torch.no_grad():
            _, last_value = agent(tensors(obs))
        rollout.compute_advantage(last_value, gamma=GAMMA, lam=LAM)

        # Learn.
        for batch in rollout.minibatches(BATCH_SIZE, epochs=EPOCHS):
            policy, value = agent(batch["obs"])
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
            advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
            clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
            policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            value_loss = (value - batch["return"]).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - ENTROPY * policy.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        recent = stats.episodes()["return"][-200:]
        if len(recent):
            print(f"{num_steps:9,} steps   mean return of the last {len(recent):3} episodes {recent.mean():6.2f}")
    env.close()
    return stats.episodes()["return"].tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO with Dict observations.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=TOTAL_STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    train(args.seed, args.total_steps)
