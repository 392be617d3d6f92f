"""A world model that writes its latent states back into the replay buffer, and starts the next sequences from them.

    python examples/latent_replay.py --plot latent_replay.png    # written back and from zeros, both curves, a minute

A boat drifts in a hidden current; its measured speed is noisy. To predict the next speed, a model has to remember many
steps, but it is trained on short sequences. If these start from zeros, it hardly learns to remember more than their
length. The state before each step is a `Mutable` `Carry` field: the learner writes the states that it has just
computed, and sequences that are drawn later start from them. `NewFirst` draws new sequences first and old ones at
random. (Hafner et al., Mastering Diverse Domains through World Models, 2023.)
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

NUM_ENVS, CAPACITY, LEARNING_STARTS = 8, 20_000, 1_000
LENGTH, BATCH_SIZE, LATENT, LEARNING_RATE = 4, 64, 32, 1.5e-3
EPISODE, NOISE, EVALUATED, EVALUATE_EVERY = 60, 1.5, 256, 100
"""Steps of an episode; standard deviation of the measurements; episodes of an evaluation; updates between two."""


class Boat(gym.Env[np.ndarray, np.ndarray]):
    """v ← 0.8 v + action + current. The current is constant in an episode and hidden; v is seen with noise."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(-0.3, 0.3, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.current, self.speed, self.steps = self.np_random.normal(0, 0.3, 2), np.zeros(2), 0
        return self._measured(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.speed = 0.8 * self.speed + action + self.current
        self.steps += 1
        return self._measured(), 0.0, False, self.steps == EPISODE, {}

    def _measured(self) -> np.ndarray:
        return (self.speed + self.np_random.normal(0, NOISE, 2)).astype(np.float32)


class Model(nn.Module):
    """The latent state after each step, and the predicted next observation."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, LATENT)
        self.head = nn.Sequential(nn.Linear(LATENT, LATENT), nn.SiLU(), nn.Linear(LATENT, 2))

    def forward(self, obs: Tensor, action: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [B, L + 1, H] before each step and after the last, and the predictions [B, L, 2]."""
        states = [state]
        for t in range(obs.shape[1]):
            states.append(self.cell(torch.cat([obs[:, t], action[:, t]], 1), states[-1]))
        return torch.stack(states, 1), self.head(torch.stack(states[1:], 1))


def learn(model: Model, optimizer: torch.optim.Optimizer, replay: rl.ReplayBuffer, *, writes_back: bool) -> None:
    """Update the model on a batch of sequences, and write the computed states back."""
    batch = replay.sample(BATCH_SIZE, rl.Sequence(LENGTH + 1, step_index=True))
    states, foreseen = model(batch["obs"], batch["action"], batch["state"])
    error = (foreseen - batch["next_obs"]).square().sum(-1)[batch["mask"]].mean()
    optimizer.zero_grad()
    error.backward()
    optimizer.step()
    if writes_back:
        # The state before the first step came from the buffer, so only those before the other steps are new.
        replay.write(batch["step_index"][:, 1:], state=states[:, 1:-1].detach())


@torch.no_grad()
def evaluate(model: Model, seed: int) -> float:
    """Return mean squared error of the predicted speeds in the second half of new episodes."""
    random = np.random.default_rng(seed)
    current, speed = random.normal(0, 0.3, (EVALUATED, 2)), np.zeros((EVALUATED, 2))
    state, errors = torch.zeros(EVALUATED, LATENT), []
    for step in range(EPISODE):
        obs, action = speed + random.normal(0, NOISE, speed.shape), random.uniform(-0.3, 0.3, speed.shape)
        speed = 0.8 * speed + action + current
        states, foreseen = model(*(torch.as_tensor(x, dtype=torch.float32).unsqueeze(1) for x in (obs, action)), state)
        state = states[:, -1]
        if step >= EPISODE // 2:
            errors.append(float((foreseen[:, 0] - torch.as_tensor(speed)).square().sum(1).mean()))
    return float(np.mean(errors))


def train(seed: int, updates: int, *, writes_back: bool) -> list[tuple[int, float]]:
    """Train and return the curve: (updates, error of the predicted speed)."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    env = gym.vector.SyncVectorEnv([Boat] * NUM_ENVS)
    replay = rl.ReplayBuffer.for_env(
        env, CAPACITY, extra={"state": rl.Mutable(rl.Carry(LATENT))}, sampler=rl.NewFirst(0.5, LENGTH), seed=seed
    )
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    # Every step is stored with a state of zeros, until an update has computed its state.
    unknown = torch.zeros(NUM_ENVS, LATENT)

    curve: list[tuple[int, float]] = []
    obs, _ = env.reset(seed=seed)
    while len(curve) * EVALUATE_EVERY < updates:
        for _ in range(EVALUATE_EVERY):
            while True:
                action = random.uniform(-0.3, 0.3, (NUM_ENVS, 2)).astype(np.float32)
                step = env.step(action)
                replay.add_step(obs, action, step, state=unknown)
                obs = step[0]
                if len(replay) >= LEARNING_STARTS:
                    break
            learn(model, optimizer, replay, writes_back=writes_back)
        curve.append(((len(curve) + 1) * EVALUATE_EVERY, evaluate(model, seed)))
        print(f"{curve[-1][0]:7,} updates   error of the predicted speed {curve[-1][1]:.4f}")
    env.close()
    return curve


def plot(path: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only --plot needs it)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title=f"A model trained on sequences of {LENGTH + 1} steps, in episodes of {EPISODE}",
        xlabel="updates",
        ylabel="squared error of the predicted speed",
    )
    for name, curve in curves.items():
        axes.plot(*np.array(curve).T, linewidth=2, label=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Latent states that are written back into the replay buffer.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=3_000)
    parser.add_argument("--plot", type=Path, default=None, help="save the curves here (needs matplotlib)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, writes_back in (("from states that were written back", True), ("from zeros", False)):
        print(name)
        curves[name] = train(args.seed, args.updates, writes_back=writes_back)
    if args.plot:
        plot(args.plot, curves)


if __name__ == "__main__":
    main()
