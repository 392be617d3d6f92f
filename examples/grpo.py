"""Learning without a critic: every episode is compared with episodes that started alike (as GRPO does).

    python examples/grpo.py             # ten seconds
    python examples/grpo.py --kl 0.1    # stay near a frozen reference policy

The return of an episode depends on its start, so returns from different starts say little about the actions.
Environments of one group share their start; differences within a group come from the policy. `group_advantage` compares
them step by step, and no critic is needed.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from relive import RolloutBuffer, group_advantage


@dataclass(frozen=True)
class Settings:
    num_groups: int = 8
    group_size: int = 8
    num_steps: int = 40
    gamma: float = 0.97
    epochs: int = 4
    batch_size: int = 640
    learning_rate: float = 3e-3
    clip: float = 0.2


SOLVED = -4.0
"""The return of parcels that go straight to their goal; parcels that drift about get -50."""


class Parcels:
    """Carry a parcel through a field of wind to its goal; neighbours of one group share start, goal and wind.

    Observation: the way to the goal, the velocity, and the wind. A step costs the distance to the goal. Reaching the
    goal terminates, and so does leaving the field, which costs 20. Ended parcels rest until all are reset together.
    """

    def __init__(self, num_groups: int, group_size: int, seed: int) -> None:
        self.num_groups, self.group_size = num_groups, group_size
        self.num_envs = num_groups * group_size
        self.random = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        def shared(low: float, high: float) -> np.ndarray:
            angle = self.random.uniform(0, 2 * np.pi, self.num_groups)
            size = self.random.uniform(low, high, self.num_groups)
            return np.repeat(np.stack([size * np.cos(angle), size * np.sin(angle)], 1), self.group_size, 0)

        self.place, self.goal, self.wind = shared(0.5, 1.5), shared(0.0, 0.5), shared(0.0, 0.3)
        self.velocity = np.zeros_like(self.place)
        self.ended = np.zeros(self.num_envs, dtype=np.bool_)
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the next observation, the reward, and the environments that just ended."""
        moves = ~self.ended[:, None]
        self.velocity = np.where(moves, 0.7 * self.velocity + 0.1 * action.clip(-1, 1) + 0.1 * self.wind, 0.0)
        self.place = self.place + self.velocity
        distance = np.linalg.norm(self.goal - self.place, axis=1)
        arrived, lost = distance < 0.1, np.linalg.norm(self.place, axis=1) > 2.5
        reward = np.where(self.ended, 0.0, -distance - 20.0 * lost)
        ends_now = (arrived | lost) & ~self.ended
        self.ended |= ends_now
        return self._observe(), reward, ends_now

    def _observe(self) -> np.ndarray:
        return np.concatenate([self.goal - self.place, self.velocity * 5, self.wind * 3], 1).astype(np.float32)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, obs: Tensor) -> Independent:
        return Independent(Normal(self.mean(obs), self.log_std.exp()), 1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum().clamp(min=1)


def train(seed: int, num_rollouts: int, kl: float = 0.0, settings: Settings = Settings()) -> list[float]:  # noqa: B008
    """Train and return the mean return of every rollout's episodes."""
    torch.manual_seed(seed)
    env = Parcels(settings.num_groups, settings.group_size, seed)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(policy.parameters(), settings.learning_rate)
    rollout = RolloutBuffer(settings.num_steps, env.num_envs, obs=6, action=2, seed=seed)
    never = np.zeros(env.num_envs, dtype=np.bool_)

    returns: list[float] = []
    for number in range(num_rollouts):
        # Act: all environments start anew, the members of a group from the same state.
        rollout.clear()
        obs = env.reset()
        while not rollout.is_full:
            with torch.no_grad():
                acts = policy(torch.as_tensor(obs))
                action = acts.sample()
            next_obs, reward, ended = env.step(action.numpy())
            rollout.add(obs, action, reward, ended, never, log_prob=acts.log_prob(action))
            obs = next_obs

        # Compare.
        seq_return, seq_mask, advantage = group_advantage(
            rollout["reward"], rollout["terminated"], group_size=settings.group_size, gamma=settings.gamma
        )
        rollout.attach(seq_return=seq_return, seq_mask=seq_mask, advantage=advantage)

        # Learn from the steps of first episodes only: what comes after an end has seq_mask False.
        for batch in rollout.minibatches(settings.batch_size, epochs=settings.epochs):
            log_prob = policy(batch["obs"]).log_prob(batch["action"])
            ratio = (log_prob - batch["log_prob"]).exp()
            clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
            gain = torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
            loss = -masked_mean(gain, batch["seq_mask"])
            if kl:
                away = reference(batch["obs"]).log_prob(batch["action"]) - log_prob
                loss = loss + kl * masked_mean(away.exp() - away - 1.0, batch["seq_mask"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()

        returns.append(float((rollout["reward"] * seq_mask).sum(0).mean()))
        if number % 10 == 9:
            print(f"{number + 1:4} rollouts   mean return of the last 10 {np.mean(returns[-10:]):7.2f}")
    return returns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Group-relative policy optimisation.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the distance to the first policy")
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    history = train(args.seed, args.rollouts, args.kl)
    verdict = "solved" if np.mean(history[-10:]) > SOLVED else f"not yet the {SOLVED} of a solved task"
    print(f"return of the first rollout {history[0]:.2f}, of the last 10 {np.mean(history[-10:]):.2f}: {verdict}")
