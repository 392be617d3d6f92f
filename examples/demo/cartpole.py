"""PPO on CartPole-v1, with the returns, the buffer's share of the time, and the learning curve."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from relive import EpisodeStats, RolloutBuffer


@dataclass(frozen=True)
class Settings:
    """The settings of PPO. The defaults solve CartPole-v1 in well under a minute on two slow cores."""

    num_envs: int = 8
    num_steps: int = 64
    max_transitions: int = 300_000
    target: float = 475.0
    """Mean return over the last 100 episodes at which Gymnasium counts the task as solved."""
    gamma: float = 0.98
    lam: float = 0.9
    epochs: int = 8
    batch_size: int = 256
    learning_rate: float = 1e-3
    clip: float = 0.2


NUM_AVERAGED = 100
"""Number of last episodes whose mean return decides whether the task is solved."""


class Report(NamedTuple):
    """The state of the training after an update."""

    stats: EpisodeStats
    """Statistics of every finished episode."""
    seconds: float
    buffer_seconds: float
    solved: bool
    rollout: RolloutBuffer
    """The last rollout, with its advantages."""

    @property
    def buffer_share(self) -> float:
        """Share of the time spent in calls of the buffer."""
        return self.buffer_seconds / self.seconds

    def mean(self, field: str) -> float:
        """Return the mean "return" or "length" of the last episodes; nan before the first end."""
        return mean_of_last_episodes(self.stats, field)


def mean_of_last_episodes(stats: EpisodeStats, field: str) -> float:
    return float(stats.episodes()[field][-NUM_AVERAGED:].double().mean())


class Stopwatch:
    """Adds up the time spent in `with stopwatch:`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._start


class Agent(nn.Module):
    """A policy over discrete actions and a critic."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.policy = _network(num_inputs, num_actions, last_gain=0.01)
        self.critic = _network(num_inputs, 1, last_gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of all actions [B, A] and values [B]."""
        return self.policy(obs).log_softmax(-1), self.critic(obs).squeeze(-1)


def _network(num_inputs: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(num_inputs, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Seed torch and use one thread (faster for networks this small); afterwards restore the caller's settings."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def train(settings: Settings, seed: int) -> Generator[Report]:
    """Train until the task is solved or the steps are used up; yield a report after every update."""
    env = gym.make_vec("CartPole-v1", settings.num_envs, "sync")
    try:
        with reproducible(seed):
            yield from _train(env, settings, seed)
    finally:
        env.close()


def _train(env: gym.vector.VectorEnv, settings: Settings, seed: int) -> Iterator[Report]:
    # Wide enough for every episode: each has at least one transition.
    stats = EpisodeStats(settings.num_envs, window=settings.max_transitions)
    rollout = RolloutBuffer.for_env(env, settings.num_steps, stats=stats, seed=seed)
    agent = Agent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), settings.learning_rate, eps=1e-5)
    buffer_time, start = Stopwatch(), perf_counter()
    obs, _ = env.reset(seed=seed)
    solved = False
    while not solved and stats.num_steps < settings.max_transitions:
        with buffer_time:
            rollout.clear()
        while not rollout.is_full:
            with torch.no_grad():
                log_probs, value = agent(torch.as_tensor(obs))
                action = torch.multinomial(log_probs.exp(), 1)
            step = env.step(action.squeeze(1).numpy())
            with buffer_time:
                rollout.add_step(
                    obs, action.squeeze(1), step, value=value, log_prob=log_probs.gather(1, action).squeeze(1)
                )
            obs = step[0]
        with torch.no_grad():
            _, last_value = agent(torch.as_tensor(obs))
        with buffer_time:
            rollout.compute_advantage(last_value, gamma=settings.gamma, lam=settings.lam)
        _update(agent, optimizer, rollout, settings, buffer_time)
        solved = stats.num_episodes >= NUM_AVERAGED and mean_of_last_episodes(stats, "return") >= settings.target
        yield Report(stats, perf_counter() - start, buffer_time.seconds, solved, rollout)


def _update(
    agent: Agent, optimizer: torch.optim.Optimizer, rollout: RolloutBuffer, settings: Settings, buffer_time: Stopwatch
) -> None:
    batches = rollout.minibatches(settings.batch_size, epochs=settings.epochs)
    while True:
        with buffer_time:
            batch = next(batches, None)
        if batch is None:
            return
        log_probs, value = agent(batch["obs"])
        log_prob = log_probs.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        ratio = (log_prob - batch["log_prob"]).exp()
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        value_loss = (value - batch["return"]).square().mean()
        optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss).backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()


def save_curve(path: Path, stats: EpisodeStats, *, target: float, title: str) -> bool:
    """Plot the returns over the transitions into `path`; return False if matplotlib is not installed."""
    try:
        # A separate Figure: pyplot would choose a window system and keep global state.
        from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError:
        return False
    episodes = stats.episodes()
    steps, returns = episodes["step"].numpy(), episodes["return"].numpy()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, returns, ".", color="tab:blue", alpha=0.3, markersize=4, label="one episode")
    axes.plot(
        steps,
        trailing_mean(returns, NUM_AVERAGED),
        color="tab:blue",
        linewidth=2,
        label=f"mean of the last {NUM_AVERAGED}",
    )
    axes.axhline(target, color="tab:green", linestyle="--", linewidth=1, label=f"solved: {target:g}")
    axes.set(title=title, xlabel="transitions", ylabel="return", ylim=(0, None))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean [E] of each value and up to `window - 1` values before it."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)
