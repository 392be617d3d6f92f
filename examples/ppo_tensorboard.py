"""PPO on CartPole-v1 that logs its episodes to TensorBoard, with observations on one scale.

    pip install tensorboard
    python examples/ppo_tensorboard.py      # under a minute
    tensorboard --logdir runs

The buffer counts (`stats=`) and measures (`norm=`) what it stores. `stats.summary()` is a flat dict of floats: one loop
logs returns, lengths, and how episodes end. Why an episode ended is a field of the buffer: the statistics read the
fields that have the names of their reasons, at the steps where an episode ends.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import relive as rl

NUM_ENVS, NUM_STEPS, TOTAL_STEPS = 8, 64, 80_000
GAMMA, LAM, EPOCHS, BATCH_SIZE, LEARNING_RATE, CLIP = 0.98, 0.9, 8, 256, 1e-3, 0.2
MAX_DISTANCE, MAX_ANGLE = 2.4, np.radians(12)  # bounds at which CartPole ends an episode


class Agent(nn.Module):
    """A policy over two actions and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
            for outputs in (2, 1)
        )

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.actor(obs)), self.critic(obs).squeeze(-1)


def train(log_dir: Path, seed: int, total_steps: int) -> dict[str, float]:
    """Train, log after every rollout, and return the last summary."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (the message says what to install)
    except ImportError as missing:
        sys.exit(f"{missing}. Run: pip install tensorboard")
    writer = SummaryWriter(str(log_dir))
    env = gym.make_vec("CartPole-v1", NUM_ENVS, "sync")
    torch.manual_seed(seed)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE)
    stats = rl.EpisodeStats(NUM_ENVS, window=100, reasons=("tilted", "far"))
    norm = rl.RunningNorm(4, clip=10.0)
    flag = rl.Field((), torch.bool)
    rollout = rl.RolloutBuffer.for_env(
        env, NUM_STEPS, extra={"tilted": flag, "far": flag}, stats=stats, norm={"obs": norm}, seed=seed
    )

    obs, _ = env.reset(seed=seed)
    while stats.num_steps < total_steps:
        # Act. The buffer keeps updating the norm; acting and learning use the copy made at the start of the rollout, so
        # that the first ratio is 1.
        rollout.clear()
        known = copy.deepcopy(norm)
        while not rollout.is_full:
            with torch.no_grad():
                policy, value = agent(known(obs))
                action = policy.sample()
                log_prob = policy.log_prob(action)
            step = env.step(action.numpy())
            ends = {"tilted": abs(step[0][:, 2]) > MAX_ANGLE, "far": abs(step[0][:, 0]) > MAX_DISTANCE}
            rollout.add_step(obs, action, step, value=value, log_prob=log_prob, **ends)
            obs = step[0]

        # Learn. Observations are stored as they came.
        with torch.no_grad():
            _, last_value = agent(known(obs))
        rollout.compute_advantage(last_value, gamma=GAMMA, lam=LAM)
        value_loss = torch.zeros(())
        for batch in rollout.minibatches(BATCH_SIZE, epochs=EPOCHS):
            policy, value = agent(known(batch["obs"]))
            advantage = rl.normalize(batch["advantage"])
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
            policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            value_loss = (value - batch["return"]).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()

        # Log.
        for name, number in stats.summary().items():
            writer.add_scalar(f"episode/{name}", number, stats.num_steps)
        explained = rl.explained_variance(rollout["value"], rollout["return"], mask=rollout["mask"])
        writer.add_scalar("explained_variance", explained.item(), stats.num_steps)
        writer.add_scalar("loss/value", value_loss.item(), stats.num_steps)
    env.close()
    writer.close()
    return stats.summary()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1, logged to TensorBoard.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=TOTAL_STEPS)
    parser.add_argument("--log-dir", type=Path, default=Path("runs/ppo"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    for name, number in train(args.log_dir, args.seed, args.total_steps).items():
        print(f"{name:18} {number:10.3f}")
    print(f"tensorboard --logdir {args.log_dir}")
