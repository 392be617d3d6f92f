"""Soft actor-critic with the actor in a separate process, on Pendulum-v1 in a minute or two.

    python examples/async_sac.py
    python examples/async_sac.py --seed 2 --plot pendulum.png

The replay buffer is in shared memory: the actor adds and the learner samples. They wait for each other only at the rate
limit, which keeps the number of samples per step as in a single process. A thread prefetches batches while the learner
computes. The policy's weights are shared tensors: the actor always acts with the newest ones.
"""

from __future__ import annotations

import argparse
import copy
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, multiprocessing, nn
from torch.distributions import Normal
from torch.nn import functional

import relive as rl

CAPACITY, LEARNING_STARTS, BATCH_SIZE = 20_000, 500, 128
GAMMA, LEARNING_RATE, TARGET_RATE = 0.98, 1e-3, 0.01
LOG_STD_RANGE = (-5.0, 2.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Soft actor-critic on Pendulum-v1, acting and learning in two processes."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=10_000, help="environment steps")
    parser.add_argument("--plot", type=Path, default=None, help="save the learning curve here (needs matplotlib)")
    return parser.parse_args()


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_outputs))


class Actor(nn.Module):
    """A normal distribution squashed into (-1, 1)."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.net = mlp(num_inputs, 2 * num_actions)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return an action [B, A] and its log-probability [B]."""
        mean, log_std = self.net(obs).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(*LOG_STD_RANGE).exp(), validate_args=False)
        raw = normal.rsample()
        # log(1 - tanh²) in the form that does not underflow.
        squash = 2.0 * (np.log(2.0) - raw - functional.softplus(-2.0 * raw))
        return raw.tanh(), (normal.log_prob(raw) - squash).sum(-1)


class Critics(nn.Module):
    """Two estimates of Q; the learner uses the smaller one."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.first, self.second = mlp(num_inputs, 1), mlp(num_inputs, 1)

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.cat([obs, action], -1)
        return self.first(pair).squeeze(-1), self.second(pair).squeeze(-1)


def limited(replay: rl.ReplayBuffer) -> rl.RateLimit:
    """Limit the rate to one batch per step; actor and learner may be 100 steps apart."""
    ratio = {"samples_per_insert": BATCH_SIZE, "tolerance": 100 * BATCH_SIZE}
    return rl.RateLimit(replay, **ratio, min_size=LEARNING_STARTS, timeout=60.0)


def act(handle: Any, actor: Actor, seed: int, total_steps: int, episodes: Any, stop: Event) -> None:
    """Act in a separate process; put steps into the buffer and finished episodes into the queue."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    limit = limited(rl.connect(handle))
    env = gym.make("Pendulum-v1")
    space = env.action_space
    assert isinstance(space, gym.spaces.Box)
    obs, _ = env.reset(seed=seed)
    total = 0.0
    for num_steps in range(1, total_steps + 1):
        if num_steps <= LEARNING_STARTS:
            action = rng.uniform(-1.0, 1.0, space.shape[0]).astype(np.float32)
        else:
            with torch.no_grad():
                action = actor(torch.as_tensor(obs))[0].numpy()
        next_obs, reward, terminated, truncated, _ = env.step(action * space.high)
        limit.add(obs, action, reward, terminated, truncated, next_obs)
        total += float(reward)
        obs = next_obs
        if terminated or truncated:
            episodes.put((num_steps, total))
            total, obs = 0.0, env.reset()[0]
        if stop.is_set():
            break


def train(seed: int, total_steps: int) -> list[tuple[int, float]]:
    """Train and return the episodes: (step at which it ended, return)."""
    env = gym.make("Pendulum-v1")
    num_obs, num_actions = 3, 1
    torch.manual_seed(seed)
    actor, critics = Actor(num_obs, num_actions), Critics(num_obs + num_actions)
    actor.share_memory()
    target_critics = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros((), requires_grad=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), LEARNING_RATE)
    critic_optimizer = torch.optim.Adam(critics.parameters(), LEARNING_RATE)
    alpha_optimizer = torch.optim.Adam([log_alpha], LEARNING_RATE)
    replay = rl.ReplayBuffer.for_env(env, CAPACITY, device=rl.Memory.shared(), seed=seed)
    env.close()

    def update(batch: TensorDict) -> None:
        # Update the critics.
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = actor(batch["next_obs"])
            next_value = torch.minimum(*target_critics(batch["next_obs"], next_action)) - alpha * next_log_prob
            target = batch["reward"] + GAMMA * (~batch["terminated"]) * next_value
        critic_loss = sum((q - target).square().mean() for q in critics(batch["obs"], batch["action"]))
        assert isinstance(critic_loss, Tensor)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        # Update the actor.
        new_action, log_prob = actor(batch["obs"])
        actor_loss = (alpha * log_prob - torch.minimum(*critics(batch["obs"], new_action))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        # Update the weight of entropy: the target is −1 nat per action dimension.
        alpha_loss = -(log_alpha.exp() * (log_prob.detach() - num_actions)).mean()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        alpha_optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target_critics.parameters(), critics.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)

    processes: Any = multiprocessing.get_context("spawn")
    queue, stop = processes.SimpleQueue(), processes.Event()
    acting = processes.Process(target=act, args=(replay.handle(), actor, seed, total_steps, queue, stop), daemon=True)
    acting.start()
    episodes: list[tuple[int, float]] = []
    try:
        with rl.prefetch(limited(replay), BATCH_SIZE) as batches:
            for num_updates in range(1, total_steps - LEARNING_STARTS + 1):
                update(next(batches))
                while not queue.empty():
                    episodes.append(queue.get())
                if num_updates % 1_000 == 0 and episodes:
                    recent = [total for _, total in episodes[-10:]]
                    print(
                        f"{num_updates:6,} updates   return of the last {len(recent)} episodes {np.mean(recent):8.1f}"
                    )
    finally:
        stop.set()
    acting.join()
    while not queue.empty():
        episodes.append(queue.get())
    return episodes


def plot(path: Path, episodes: list[tuple[int, float]], title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only --plot needs it)

    steps, returns = np.array(episodes).T
    window = np.ones(min(10, len(returns)))
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
    history = train(args.seed, args.total_steps)
    returns = [return_ for _, return_ in history[-10:]]
    print(f"mean return of the last {len(returns)} of {len(history)} episodes: {np.mean(returns):.1f}")
    if args.plot:
        plot(args.plot, history, f"Soft actor-critic on Pendulum-v1, seed {args.seed}")
