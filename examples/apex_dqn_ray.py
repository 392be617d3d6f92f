"""Ape-X in one file: several actor processes and one learner share a prioritized memory, on CartPole-v1.

    pip install ".[ray]"
    python examples/apex_dqn_ray.py
    python examples/apex_dqn_ray.py --seed 2 --actors 4 --shards 2 --checkpoint runs/apex

Every actor steps its own environments, has its own exploration rate, and sends its steps to the service in blocks. The
learner samples 3-step transitions and sends new priorities back. An actor that has finished a round gets the newest
weights; the others continue. To run on a cluster, start this file where `ray.init()` finds one. (Horgan et al.,
Distributed Prioritized Experience Replay, 2018.)
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from torch import Tensor, nn
from torch.nn import functional

import relive as rl
from relive.distributed import ReplayService

ENVS_PER_ACTOR = 2
ROUND, BLOCK = 100, 25
"""Number of steps that an actor makes with the same weights, and of those that it sends at once."""
CAPACITY, LEARNING_STARTS, BATCH_SIZE, BATCHES_PER_ROUND = 40_000, 1_000, 256, 50
GAMMA, N_STEP, LEARNING_RATE, TARGET_RATE, MAX_GRAD_NORM = 0.99, 3, 1e-3, 0.01, 10.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prioritized 3-step double DQN with many actors on CartPole-v1.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=60_000, help="environment steps of all actors together")
    parser.add_argument("--actors", type=int, default=3)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default=None, help="the memory survives its processes here")
    return parser.parse_args()


def q_network(num_inputs: int, num_actions: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_actions)
    )


def q_of(net: nn.Module, obs: Tensor, action: Tensor) -> Tensor:
    return net(obs).gather(-1, action.unsqueeze(-1)).squeeze(-1)


@ray.remote(num_cpus=0)
class Actor:
    """Some environments, and a policy that is slightly older than the learner's."""

    def __init__(self, service: ReplayService, number: int, num_actors: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.env = gym.make_vec("CartPole-v1", ENVS_PER_ACTOR, "sync")
        self.net = q_network(4, 2)
        self.rng = np.random.default_rng([seed, number])
        self.epsilon = 0.4 ** (1 + 7 * number / max(num_actors - 1, 1))
        self.stats = rl.EpisodeStats(ENVS_PER_ACTOR, window=1_000)
        first = number * ENVS_PER_ACTOR
        self.writer = service.writer(range(first, first + ENVS_PER_ACTOR), block=BLOCK)
        self.obs, _ = self.env.reset(seed=seed * 1_000 + first)
        self.resetting = np.zeros(ENVS_PER_ACTOR, np.bool_)

    def collect(self, weights: dict[str, Tensor]) -> list[float]:
        """Collect a round of steps; returns the episode returns of that round."""
        self.net.load_state_dict(weights)
        before = self.stats.num_episodes
        for _ in range(ROUND):
            with torch.no_grad():
                greedy = self.net(torch.as_tensor(self.obs)).argmax(-1).numpy()
            explores = self.rng.random(ENVS_PER_ACTOR) < self.epsilon
            action = np.where(explores, self.rng.integers(2, size=ENVS_PER_ACTOR), greedy)
            step = self.env.step(action)
            self.writer.add_step(self.obs, action, step)
            self.obs, reward, terminated, truncated, _ = step
            self.stats.update(reward, terminated, truncated, mask=~self.resetting)
            self.resetting = terminated | truncated
        ended = self.stats.num_episodes - before
        return self.stats.episodes()["return"][-ended:].tolist() if ended else []


def train(
    seed: int, total_steps: int, num_actors: int = 3, num_shards: int = 1, checkpoint: Path | None = None
) -> list[tuple[int, float]]:
    """Train and return the episodes of the actor that explores least: (step at which it was reported, return)."""
    torch.manual_seed(seed)
    net = q_network(4, 2)
    target_net = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)

    # Importance weights correct fully (beta = 1) only at the end, when the values have settled.
    draws = total_steps // (ROUND * ENVS_PER_ACTOR) * BATCHES_PER_ROUND
    env = gym.make("CartPole-v1")
    service = ReplayService(
        f"apex-{seed}",
        CAPACITY // (num_actors * ENVS_PER_ACTOR) * num_actors * ENVS_PER_ACTOR,
        env.observation_space,
        env.action_space,
        num_envs=num_actors * ENVS_PER_ACTOR,
        num_shards=num_shards,
        sampler=rl.Prioritized(alpha=0.6, beta=rl.Linear(0.4, 1.0, draws)),
        autoreset="NEXT_STEP",
        checkpoint=checkpoint,
        seed=seed,
    )
    view = rl.NStep(N_STEP, GAMMA)

    with service:
        actors: list[Any] = [Actor.remote(service, number, num_actors, seed) for number in range(num_actors)]
        rounds = {actor.collect.remote(net.state_dict()): actor for actor in actors}
        episodes: list[tuple[int, float]] = []
        for num_rounds in range(1, total_steps // (ROUND * ENVS_PER_ACTOR) + 1):
            # An actor that has finished a round continues with the newest weights, while the learner learns.
            told = ray.wait(list(rounds))[0][0]
            actor = rounds.pop(told)
            rounds[actor.collect.remote(net.state_dict())] = actor
            num_steps = num_rounds * ROUND * ENVS_PER_ACTOR
            if actor is actors[-1]:
                episodes += [(num_steps, return_) for return_ in ray.get(told)]
            if num_steps % 5_000 == 0 and episodes:
                recent = [return_ for _, return_ in episodes[-20:]]
                print(f"{num_steps:7,} steps   mean return of the last {len(recent)} episodes {np.mean(recent):6.1f}")
            if num_steps < LEARNING_STARTS:
                continue

            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - num_steps / total_steps)
            for _ in range(BATCHES_PER_ROUND):
                # Learn. Double: one network chooses the next action, the other evaluates it.
                batch = service.sample(BATCH_SIZE, view)
                next_obs = batch["next_obs"]
                with torch.no_grad():
                    next_action = net(next_obs).argmax(-1)
                    bootstrap = batch["discount"] * (~batch["terminated"]) * q_of(target_net, next_obs, next_action)
                    target = batch["reward"] + bootstrap
                q = q_of(net, batch["obs"], batch["action"])
                loss = (batch["weight"] * functional.smooth_l1_loss(q, target, reduction="none")).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                service.update_priority(batch["index"], (target - q).abs().detach())
                with torch.no_grad():
                    for slow, fast in zip(target_net.parameters(), net.parameters(), strict=True):
                        slow.lerp_(fast, TARGET_RATE)
        ray.wait(list(rounds), num_returns=len(rounds))
    return episodes


if __name__ == "__main__":
    args = arguments()
    torch.set_num_threads(1)  # small networks run fastest on one core
    ray.init(include_dashboard=False, ignore_reinit_error=True)
    history = train(args.seed, args.total_steps, args.actors, args.shards, args.checkpoint)
    returns = [return_ for _, return_ in history[-20:]]
    print(f"mean return of the last {len(returns)} of {len(history)} episodes: {np.mean(returns):.1f}")
    ray.shutdown()
