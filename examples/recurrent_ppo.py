"""Recurrent PPO on CartPole without velocities: a task that a policy without memory cannot solve.

    python examples/recurrent_ppo.py --plot memory.png    # with a GRU and without, both curves, two minutes

The hidden state is a `Carry` field: `rollout.sequences` returns it only for the first step of each sequence. Sequences
end with their episodes, are padded to one length, and come with a mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import relive as rl


@dataclass(frozen=True)
class Settings:
    num_envs: int = 16
    num_steps: int = 128
    sequence: int = 32
    sequences_per_batch: int = 16
    gamma: float = 0.98
    lam: float = 0.9
    epochs: int = 8
    learning_rate: float = 1e-3
    clip: float = 0.2
    entropy: float = 0.003
    hidden: int = 64


class WithoutVelocities(gym.ObservationWrapper[np.ndarray, int, np.ndarray]):
    """CartPole with positions only: the cart's place and the pole's angle, without velocities."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]] / np.array([2.4, 0.21], np.float32)


class Net(nn.Module):
    """A small network that has a memory (a GRU) or has none."""

    def __init__(self, num_inputs: int, num_outputs: int, hidden: int, *, memory: bool, last_gain: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_inputs, hidden), nn.Tanh())
        self.gru = nn.GRU(hidden, hidden, batch_first=True) if memory else None
        last = nn.Linear(hidden, num_outputs)
        nn.init.orthogonal_(last.weight, last_gain)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), last)

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs for obs [B, L, …] from the states [B, H] before them, and the states after them."""
        features = self.encoder(obs)
        if self.gru is not None:
            features, last = self.gru(features, state.unsqueeze(0))
            state = last.squeeze(0)
        return self.head(features), state


class Agent(nn.Module):
    """A policy and a critic, each with its own memory."""

    def __init__(self, num_inputs: int, num_actions: int, hidden: int, *, memory: bool) -> None:
        super().__init__()
        self.actor = Net(num_inputs, num_actions, hidden, memory=memory, last_gain=0.01)
        self.critic = Net(num_inputs, 1, hidden, memory=memory, last_gain=1.0)

    def forward(self, obs: Tensor, state: Mapping[str, Tensor]) -> tuple[Categorical, Tensor, dict[str, Tensor]]:
        """Return policies and values [B, L], and the states after the last step."""
        logits, actor = self.actor(obs, state["actor"])
        value, critic = self.critic(obs, state["critic"])
        return Categorical(logits=logits), value.squeeze(-1), {"actor": actor, "critic": critic}


@torch.no_grad()
def act(agent: Agent, obs: np.ndarray, state: Mapping[str, Tensor]) -> tuple[Categorical, Tensor, dict[str, Tensor]]:
    """Return policies, values [N] and the next states for one step of every environment."""
    policy, value, after = agent(torch.as_tensor(obs).unsqueeze(1), state)
    return Categorical(logits=policy.logits.squeeze(1)), value.squeeze(1), after


def train(seed: int, total_steps: int, *, memory: bool) -> list[tuple[int, float]]:
    """Train and return the curve: (steps, mean return of the last 50 episodes)."""
    settings = Settings()
    env = gym.make_vec("CartPole-v1", settings.num_envs, "sync", wrappers=[WithoutVelocities])
    torch.manual_seed(seed)
    agent = Agent(2, 2, settings.hidden, memory=memory)
    optimizer = torch.optim.Adam(agent.parameters(), settings.learning_rate, eps=1e-5)
    stats = rl.EpisodeStats(settings.num_envs, window=50)
    carry = rl.Carry(settings.hidden)
    extra = {"state": {"actor": carry, "critic": carry}}
    rollout = rl.RolloutBuffer.for_env(env, settings.num_steps, extra=extra, stats=stats, seed=seed)

    curve: list[tuple[int, float]] = []
    obs, _ = env.reset(seed=seed)
    state = {name: torch.zeros(settings.num_envs, settings.hidden) for name in ("actor", "critic")}
    ended = torch.zeros(settings.num_envs, 1, dtype=torch.bool)
    num_steps = 0
    while num_steps < total_steps:
        # Act.
        rollout.clear()
        while not rollout.is_full:
            policy, value, after = act(agent, obs, state)
            action = policy.sample()
            step = env.step(action.numpy())
            rollout.add_step(obs, action, step, value=value, log_prob=policy.log_prob(action), state=state)
            # An ended episode keeps its memory for the step that only resets: there the critic sees the final
            # observation. Then memory starts at zero.
            obs, state = step[0], {name: memory.masked_fill(ended, 0.0) for name, memory in after.items()}
            ended = torch.as_tensor(step[2] | step[3]).unsqueeze(1)
        num_steps += len(rollout)

        # Compute advantages.
        rollout.compute_advantage(act(agent, obs, state)[1], gamma=settings.gamma, lam=settings.lam)
        rollout.attach(scaled=rl.normalize(rollout["advantage"], mask=rollout["mask"]))

        # Learn.
        optimizer.param_groups[0]["lr"] = settings.learning_rate * max(1.0 - num_steps / total_steps, 0.05)
        batches = rollout.sequences(
            settings.sequence, batch_size=settings.sequences_per_batch, epochs=settings.epochs, shuffle=True
        )
        for batch in batches:
            policy, value, _ = agent(batch["obs"], batch["state"])
            mask = batch["mask"]
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"])[mask].exp()
            advantage = batch["scaled"][mask]
            clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
            policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            value_loss = (value - batch["return"])[mask].square().mean()
            entropy = policy.entropy()[mask].mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - settings.entropy * entropy).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        summary = stats.summary()
        if "return_mean" in summary:
            curve.append((num_steps, summary["return_mean"]))
            print(f"{num_steps:9,} steps   mean return of the last 50 episodes {summary['return_mean']:8.1f}")
    env.close()
    return curve


def plot(path: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only --plot needs it)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title="CartPole without velocities", xlabel="environment steps", ylabel="mean return of 50 episodes"
    )
    for name, curve in curves.items():
        axes.plot(*np.array(curve).T, linewidth=2, label=name)
    axes.axhline(475, color="gray", linestyle=":", label="solved: 475")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Recurrent PPO on CartPole without velocities.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=120_000)
    parser.add_argument("--plot", type=Path, default=None, help="save both curves here (needs matplotlib)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, memory in (("with memory (GRU)", True), ("without memory", False)):
        print(name)
        curves[name] = train(args.seed, args.total_steps, memory=memory)
    if args.plot:
        plot(args.plot, curves)


if __name__ == "__main__":
    main()
