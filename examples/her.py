"""Hindsight experience replay in one file: flip bits until they match a goal. Rewards are so rare that plain
Q-learning never sees one; with hindsight every failure teaches how to get to where it ended.

    python examples/her.py                        # with hindsight, about a minute
    python examples/her.py --without-hindsight    # the same budget, and nothing is learned
    python examples/her.py --plot bitflip.png     # both

Hindsight is a view: the buffer stores what happened, and `sample` replaces goals by states of the same episode. The
environment's own rule recomputes reward and termination.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional

import relive as rl

NUM_BITS, NUM_ENVS, CAPACITY, LEARNING_STARTS, BATCH_SIZE = 15, 8, 100_000, 1_000, 128
GAMMA, LEARNING_RATE, TARGET_RATE, EPSILON = 0.98, 1e-3, 0.01, 0.1
WINDOW = 200
"""Number of episodes in a success rate."""

Obs = dict[str, Any]


class FlipBits(gym.Env[Obs, np.int64]):
    """Start from random bits, flip one per step, and match the goal. A step costs 1, reaching the goal nothing."""

    def __init__(self, num_bits: int) -> None:
        bits = gym.spaces.Box(0.0, 1.0, (num_bits,), np.float32)
        self.observation_space = gym.spaces.Dict({"observation": bits, "achieved_goal": bits, "desired_goal": bits})
        self.action_space = gym.spaces.Discrete(num_bits)
        self.num_bits = num_bits

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.bits, self.goal = self.np_random.integers(2, size=(2, self.num_bits)).astype(np.float32)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        self.bits[action] = 1.0 - self.bits[action]
        arrived = bool((self.bits == self.goal).all())
        return self._observe(), float(arrived) - 1.0, arrived, False, {}

    def _observe(self) -> Obs:
        # Copies, because the environment keeps changing these arrays.
        return {"observation": self.bits.copy(), "achieved_goal": self.bits.copy(), "desired_goal": self.goal.copy()}


def judge(achieved: Tensor, goal: Tensor, rows: TensorDict) -> tuple[Tensor, Tensor]:
    """Return reward and terminated of a batch of steps by the environment's rule."""
    arrived = (achieved == goal).all(-1)
    return arrived.float() - 1.0, arrived


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DQN with hindsight on a bit-flipping task.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-bits", type=int, default=NUM_BITS)
    parser.add_argument("--total-steps", type=int, default=60_000, help="environment steps")
    parser.add_argument("--without-hindsight", action="store_true", help="learn from what happened only")
    parser.add_argument("--plot", type=Path, default=None, help="train both ways and save the curves here")
    return parser.parse_args()


def features(obs: TensorDict | Obs) -> Tensor:
    return torch.cat([torch.as_tensor(obs["observation"]), torch.as_tensor(obs["desired_goal"])], -1)


def train(seed: int, total_steps: int, *, hindsight: bool, num_bits: int = NUM_BITS) -> list[tuple[int, bool]]:
    """Train and return the episodes: (step at which it ended, whether the goal was reached)."""
    env = SyncVectorEnv([lambda: TimeLimit(FlipBits(num_bits), num_bits) for _ in range(NUM_ENVS)])
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2 * num_bits, 256), nn.ReLU(), nn.Linear(256, num_bits))
    target_net = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)
    stats = rl.EpisodeStats(NUM_ENVS, window=total_steps)  # keeps every episode
    replay = rl.ReplayBuffer.for_env(env, CAPACITY, stats=stats, seed=seed)
    view = rl.Hindsight("desired_goal", "achieved_goal", judge, ratio=0.8) if hindsight else rl.Transition()

    obs, _ = env.reset(seed=seed)
    for num_steps in range(0, total_steps, NUM_ENVS):
        # Act.
        with torch.no_grad():
            greedy = net(features(obs)).argmax(-1).numpy()
        action = np.where(rng.random(NUM_ENVS) < EPSILON, rng.integers(num_bits, size=NUM_ENVS), greedy)
        step = env.step(action)
        replay.add_step(obs, action, step)
        obs = step[0]
        if num_steps % 10_000 == 0 and stats.num_episodes:
            reached = stats.episodes()["terminated"][-WINDOW:]
            print(f"{num_steps:8,} steps   success in the last {len(reached)} episodes {reached.float().mean():6.1%}")
        if len(replay) < LEARNING_STARTS:
            continue

        # Learn.
        batch = replay.sample(BATCH_SIZE, view)
        with torch.no_grad():
            next_features = features(batch["next_obs"])
            best = net(next_features).argmax(-1, keepdim=True)
            next_value = target_net(next_features).gather(-1, best).squeeze(-1)
            target = batch["reward"] + GAMMA * (~batch["terminated"]) * next_value
        q = net(features(batch["obs"])).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        optimizer.zero_grad()
        functional.smooth_l1_loss(q, target).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target_net.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
    env.close()
    episodes = stats.episodes()
    return list(zip(episodes["step"].tolist(), episodes["terminated"].tolist(), strict=True))


def plot(path: Path, curves: dict[str, list[tuple[int, bool]]], title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only --plot needs it)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="environment steps", ylabel="success rate", ylim=(-0.02, 1.02))
    for label, episodes in curves.items():
        steps, successes = np.array(episodes).T
        window = np.ones(min(WINDOW, len(steps)))
        rate = np.convolve(successes, window, "valid") / len(window)
        axes.plot(steps[len(window) - 1 :], rate, linewidth=2, label=f"{label} (mean of {len(window)} episodes)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.25)
    axes.legend(loc="center right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    args = arguments()
    torch.set_num_threads(1)  # small networks run fastest on one core
    curves: dict[str, list[tuple[int, bool]]] = {}
    for hindsight in (True, False) if args.plot else (not args.without_hindsight,):
        label = "with hindsight" if hindsight else "without hindsight"
        print(f"{args.num_bits} bits, {label}")
        curves[label] = train(args.seed, args.total_steps, hindsight=hindsight, num_bits=args.num_bits)
        print(f"success in the last {WINDOW} episodes: {np.mean([ok for _, ok in curves[label][-WINDOW:]]):.1%}")
    if args.plot:
        plot(args.plot, curves, f"Flipping {args.num_bits} bits to a wanted pattern, seed {args.seed}")
