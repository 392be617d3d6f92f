"""R2D2 on a task that needs memory: the way to turn is shown once, at the start of a corridor.

    python examples/r2d2.py --plot r2d2.png    # with a recurrent state and without, both curves, a minute

The state before each step is stored as a `Carry` field. `Sequence` reads steps around a prioritized row: burn-in first,
which only brings the stored state up to date, then the steps that are trained on. The priority of a row is
η · max |δ| + (1 − η) · mean |δ| over the trained steps. (Kapturowski et al., Recurrent Experience Replay, 2019.)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import relive as rl

NUM_ENVS, CAPACITY, LEARNING_STARTS, BATCH_SIZE = 8, 20_000, 1_000, 32
LENGTH, BURN_IN = 8, 4
HIDDEN, LEARNING_RATE, GAMMA, ETA = 32, 1e-3, 0.97, 0.9
COPY_EVERY, EXPLORE = 100, 0.1
"""Updates between two copies into the target network; the share of random actions."""
WINDOW, SOLVED = 100, 0.9


class Corridor(gym.Env[np.ndarray, np.int64]):
    """A sign shows left (−1) or right (+1), once; some steps later there is a fork, where the agent must turn."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.sign = int(self.np_random.integers(2)) * 2 - 1
        self.left_to_go = int(self.np_random.integers(4, 11))
        return np.array([self.sign, 0.0], np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        ended = self.left_to_go == 0
        reward = float((2 * action - 1) * self.sign) if ended else 0.0
        self.left_to_go -= 1
        return np.array([0.0, self.left_to_go == 0], np.float32), reward, ended, False, {}


class Net(nn.Module):
    """Action values from the observation and the recurrent state, which stays zero without memory."""

    def __init__(self, num_inputs: int, num_actions: int, *, memory: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.ReLU())
        self.cell = nn.GRUCell(HIDDEN, HIDDEN) if memory else None
        self.head = nn.Linear(2 * HIDDEN, num_actions)

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return values [B, A] of one step and the state [B, H] after it."""
        features = self.encoder(obs)
        if self.cell is not None:
            state = self.cell(features, state)
        return self.head(torch.cat([features, state], 1)), state

    def over(self, obs: Tensor, state: Tensor, train: Tensor) -> Tensor:
        """Return values [B, L, A] of sequences; no gradient goes through the states of burn-in."""
        values = []
        for j in range(obs.shape[1]):
            value, state = self(obs[:, j], state)
            values.append(value)
            if j < train.shape[1]:
                state = torch.where(train[:, j, None], state, state.detach())
        return torch.stack(values, 1)


def learn(net: Net, target: Net, optimizer: torch.optim.Optimizer, replay: rl.ReplayBuffer) -> None:
    """Make one update of double Q-learning on sequences and update the priorities of their rows."""
    batch = replay.sample(BATCH_SIZE, rl.Sequence(LENGTH, BURN_IN))
    train = batch["train"]
    # Position 0 is the step that the stored state belongs to; from there each step leads to the next one.
    seen = torch.cat([batch["obs"][:, :1], batch["next_obs"]], 1)
    values = net.over(seen, batch["state"], train)
    with torch.no_grad():
        best = values[:, 1:].argmax(-1, keepdim=True)
        following = target.over(seen, batch["state"], train)[:, 1:].gather(-1, best).squeeze(-1)
        wanted = batch["reward"] + GAMMA * following * ~batch["terminated"]
    taken = values[:, :-1].gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    error = (taken - wanted) * train  # burn-in and padding are not trained on
    count = train.sum(1)
    optimizer.zero_grad()
    (batch["weight"] * error.square().sum(1) / count).mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    replay.update_priority(batch["index"], rl.sequence_priority(error, train, eta=ETA))


def train(seed: int, total_steps: int, *, memory: bool) -> list[tuple[int, float]]:
    """Train and return the curve: (steps, mean return of the last episodes)."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    env = gym.vector.SyncVectorEnv([Corridor] * NUM_ENVS)
    stats = rl.EpisodeStats(NUM_ENVS, window=WINDOW)
    replay = rl.ReplayBuffer.for_env(
        env, CAPACITY, extra={"state": rl.Carry(HIDDEN)}, sampler=rl.Prioritized(alpha=0.6), stats=stats, seed=seed
    )
    net, target = (Net(2, 2, memory=memory) for _ in range(2))
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)

    curve: list[tuple[int, float]] = []
    obs, _ = env.reset(seed=seed)
    state, ended = torch.zeros(NUM_ENVS, HIDDEN), torch.zeros(NUM_ENVS, 1, dtype=torch.bool)
    for update in range(total_steps // NUM_ENVS):
        # Act.
        with torch.no_grad():
            values, after = net(torch.as_tensor(obs), state)
        explores = random.random(NUM_ENVS) < EXPLORE
        action = np.where(explores, random.integers(0, 2, NUM_ENVS), values.argmax(1).numpy())
        step = env.step(action)
        replay.add_step(obs, action, step, state=state)
        # The step after an end only resets; then memory starts at zero.
        obs, state = step[0], after.masked_fill(ended, 0.0)
        ended = torch.as_tensor(step[2] | step[3]).unsqueeze(1)

        # Learn.
        if len(replay) < LEARNING_STARTS:
            continue
        learn(net, target, optimizer, replay)
        if update % COPY_EVERY == 0:
            target.load_state_dict(net.state_dict())
            curve.append((update * NUM_ENVS, stats.summary()["return_mean"]))
            print(f"{curve[-1][0]:9,} steps   mean return of the last {WINDOW} episodes {curve[-1][1]:6.2f}")
    env.close()
    return curve


def plot(path: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only --plot needs it)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title="A corridor with a sign at its start",
        xlabel="environment steps",
        ylabel=f"mean return of {WINDOW} episodes",
    )
    for name, curve in curves.items():
        axes.plot(*np.array(curve).T, linewidth=2, label=name)
    axes.axhline(1 - EXPLORE, color="gray", linestyle=":", label=f"best with {EXPLORE:.0%} random actions")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="R2D2 on a task that needs memory.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=12_000)
    parser.add_argument("--no-memory", action="store_true", help="train only the network without a recurrent state")
    parser.add_argument("--plot", type=Path, default=None, help="save the curves here (needs matplotlib)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, memory in (("with memory (GRU)", True), ("without memory", False)):
        if memory and args.no_memory:
            continue
        print(name)
        curves[name] = train(args.seed, args.total_steps, memory=memory)
    if args.plot:
        plot(args.plot, curves)


if __name__ == "__main__":
    main()
