"""A training that can be killed and resumed: DQN on CartPole-v1 with checkpoints.

    python examples/resume.py runs/resume    # stop it with Ctrl-C or kill -9, run it again, and it continues

A training has four parts. The replay buffer saves itself: rows, priorities, statistics and its random generator. The
networks, the optimizer and the counters go into a file of our own, named after the number of the buffer's checkpoint,
so that both belong to the same step. The environments cannot be saved: they start new episodes, and `cut()` tells the
buffer that the old ones were abandoned.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import relive as rl

NUM_ENVS, CAPACITY, LEARNING_STARTS, BATCH_SIZE, COPY_EVERY = 4, 20_000, 500, 64, 100
GAMMA, N_STEP, LEARNING_RATE, EPSILON = 0.99, 3, 1e-3, 0.1


class Training:
    """The buffer, and everything that is saved beside it."""

    def __init__(self, env: gym.vector.VectorEnv, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.target = copy.deepcopy(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), LEARNING_RATE)
        self.random = np.random.default_rng(seed)
        self.num_steps = self.num_updates = 0
        stats = rl.EpisodeStats(NUM_ENVS, window=50)
        self.replay = rl.ReplayBuffer.for_env(env, CAPACITY, sampler=rl.Prioritized(), stats=stats, seed=seed)

    def save(self, folder: Path) -> None:
        """Save the buffer, then the rest under the same number; a kill in between leaves the previous pair."""
        number = self.replay.save(folder / "replay", keep=2)
        state = {
            "net": self.net.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.bit_generator.state,
            "counts": (self.num_steps, self.num_updates),
        }
        unfinished = folder / "learner.unfinished"
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / f"learner-{number}.pt")
        for _, old in learners(folder)[:-2]:
            old.unlink()

    def load(self, folder: Path) -> bool:
        """Load the newest pair in the folder; return False if there is none."""
        saved = learners(folder)
        if not saved:
            return False
        number, file = saved[-1]
        state: dict[str, Any] = torch.load(file, weights_only=True)
        self.net.load_state_dict(state["net"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.bit_generator.state = state["random"]
        self.num_steps, self.num_updates = state["counts"]
        self.replay = rl.load(folder / "replay", rl.ReplayBuffer, number=number)
        self.replay.cut()  # the environments start new episodes
        return True

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Return actions of all environments, some of them at random."""
        with torch.no_grad():
            greedy = self.net(torch.as_tensor(obs)).argmax(-1).numpy()
        return np.where(self.random.random(NUM_ENVS) < EPSILON, self.random.integers(2, size=NUM_ENVS), greedy)

    def learn(self) -> None:
        """Make one update of double Q-learning."""
        batch = self.replay.sample(BATCH_SIZE, rl.NStep(N_STEP, GAMMA))
        with torch.no_grad():
            following = q_of(self.target, batch["next_obs"], self.net(batch["next_obs"]).argmax(-1))
            target = batch["reward"] + batch["discount"] * ~batch["terminated"] * following
        error = q_of(self.net, batch["obs"], batch["action"]) - target
        self.optimizer.zero_grad()
        (batch["weight"] * error.square()).mean().backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
        self.optimizer.step()
        self.replay.update_priority(batch["index"], error.detach().abs())
        self.num_updates += 1
        if self.num_updates % COPY_EVERY == 0:
            self.target.load_state_dict(self.net.state_dict())


def q_of(net: nn.Module, obs: Tensor, action: Tensor) -> Tensor:
    return net(obs).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def learners(folder: Path) -> list[tuple[int, Path]]:
    """Return the saved learners with their numbers, the oldest first."""
    return sorted((int(file.stem.removeprefix("learner-")), file) for file in folder.glob("learner-*.pt"))


def train(folder: Path, total_steps: int, save_every: int, seed: int = 1) -> Training:
    """Train until `total_steps` environment steps, counting those of earlier processes."""
    folder.mkdir(parents=True, exist_ok=True)
    env = gym.make_vec("CartPole-v1", NUM_ENVS, "sync")
    training = Training(env, seed)
    resumed = training.load(folder)
    print(f"{'resumed' if resumed else 'started'} at step {training.num_steps}", flush=True)
    # A new seed: with the old one the first episodes would repeat.
    obs, _ = env.reset(seed=seed + training.num_steps)
    while training.num_steps < total_steps:
        action = training.act(obs)
        step = env.step(action)
        training.replay.add_step(obs, action, step)
        obs = step[0]
        training.num_steps += NUM_ENVS
        if len(training.replay) >= LEARNING_STARTS:
            training.learn()
        if training.num_steps % save_every < NUM_ENVS:
            training.save(folder)
            print(f"saved at step {training.num_steps}", flush=True)
    env.close()
    return training


def main() -> None:
    parser = argparse.ArgumentParser(description="DQN on CartPole-v1 that goes on after a kill.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--total-steps", type=int, default=40_000)
    parser.add_argument("--save-every", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    stats = train(args.folder, args.total_steps, args.save_every, args.seed).replay.stats
    if stats is not None and stats.num_episodes:
        print(f"mean return of the last episodes: {stats.summary()['return_mean']:.0f}")


if __name__ == "__main__":
    main()
