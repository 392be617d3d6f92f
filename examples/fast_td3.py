"""TD3 on thousands of environments that live on one device, in one file and about a minute on a CPU.

    python examples/fast_td3.py
    python examples/fast_td3.py --device cuda --num-envs 4096 --plot darts.png

Off-policy learning with a simulator on the GPU (Seo et al., FastTD3, 2025): many environments, large batches, few
updates per step, exploration noise of a different size in each environment. Environments, networks and replay buffer
are on the same device, and the loop waits for it only to print. Each observation is stored once; `add` detects resets
itself, and the critics bootstrap from the true final observation at a time limit.

The task, written in torch: a dart with momentum is pushed to a target in the plane and has to stay there. It crashes
where it leaves the field (terminated), and gets a new target after 100 steps (truncated).
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor, nn

import relive as rl

ROWS, BATCH_SIZE, UPDATES, LEARNING_STARTS = 100, 2048, 2, 10
"""Rows kept per environment, rows per update, updates per step of all environments, and steps before the first."""
N_STEP, GAMMA, LEARNING_RATE, TARGET_RATE = 3, 0.97, 1e-3, 0.02
NOISE, TARGET_NOISE, NOISE_CLIP, POLICY_DELAY = (0.05, 0.6), 0.1, 0.3, 2


class Darts:
    """`num_envs` darts. An observation is position, velocity and way to the target [N, 6], an action a push [N, 2]."""

    limit, time_limit = 2.0, 100

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.num_envs, self.device = num_envs, device
        self.position, self.velocity, self.target = (torch.zeros(num_envs, 2, device=device) for _ in range(3))
        # Not all at once: environments that started together would always end together.
        self.age = torch.arange(num_envs, device=device) % self.time_limit
        self._restart(torch.ones(num_envs, dtype=torch.bool, device=device))

    def obs(self) -> Tensor:
        return torch.cat([self.position, self.velocity, self.target - self.position], -1)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return next_obs, reward, terminated, truncated [N, …]; darts that ended have restarted."""
        self.velocity = 0.9 * self.velocity + 0.1 * action
        self.position = self.position + 0.5 * self.velocity
        self.age = self.age + 1
        terminated = self.position.abs().amax(-1) > self.limit
        truncated = self.age >= self.time_limit
        distance = (self.target - self.position).norm(dim=-1)
        reward = -distance - 0.05 * action.square().sum(-1) - 10.0 * terminated
        next_obs = self.obs()
        self._restart(terminated | truncated)
        self.age = torch.where(terminated | truncated, 0, self.age)
        return next_obs, reward, terminated, truncated

    def _restart(self, which: Tensor) -> None:
        place = torch.empty(2, self.num_envs, 2, device=self.device).uniform_(-1.5, 1.5)
        which = which.unsqueeze(-1)
        self.position, self.target = torch.where(which, place, torch.stack([self.position, self.target]))
        self.velocity = torch.where(which, 0.0, self.velocity)


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_outputs))


class Critics(nn.Module):
    """Two estimates of Q; the learner uses the smaller one."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.first, self.second = mlp(num_inputs, 1), mlp(num_inputs, 1)

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.cat([obs, action], -1)
        return self.first(pair).squeeze(-1), self.second(pair).squeeze(-1)


def train(seed: int, num_envs: int, total_steps: int, device: torch.device) -> list[tuple[int, float]]:
    """Train for `total_steps` steps of every environment; returns (transitions so far, mean reward per step)."""
    torch.manual_seed(seed)
    env = Darts(num_envs, device)
    actor, critics = nn.Sequential(mlp(6, 2), nn.Tanh()).to(device), Critics(8).to(device)
    target_actor, target_critics = (copy.deepcopy(net).requires_grad_(False) for net in (actor, critics))
    actor_optimizer = torch.optim.Adam(actor.parameters(), LEARNING_RATE)
    critic_optimizer = torch.optim.Adam(critics.parameters(), LEARNING_RATE)
    replay = rl.ReplayBuffer(ROWS * num_envs, obs=6, action=2, num_envs=num_envs, device=device, seed=seed)
    view = rl.NStep(N_STEP, GAMMA)
    # The first environments explore with little noise, the last ones with much.
    noise = torch.linspace(*NOISE, num_envs, device=device).unsqueeze(-1)

    obs, recent, history = env.obs(), torch.zeros((), device=device), []
    for step in range(1, total_steps + 1):
        with torch.no_grad():
            action = (actor(obs) + noise * torch.randn(num_envs, 2, device=device)).clamp(-1.0, 1.0)
        next_obs, reward, terminated, truncated = env.step(action)
        replay.add(obs, action, reward, terminated, truncated, next_obs)
        # The same as next_obs, except where a new episode has begun.
        obs = env.obs()
        recent += reward.mean()
        if step % 20 == 0:
            # `item` is the only call of this loop that waits for the device.
            history.append((step * num_envs, recent.item() / 20))
            print(f"{step * num_envs:9,} transitions   mean reward of a step {history[-1][1]:6.3f}")
            recent.zero_()
        for update in range(UPDATES if step > LEARNING_STARTS else 0):
            batch = replay.sample(BATCH_SIZE, view)
            with torch.no_grad():
                wobble = (TARGET_NOISE * torch.randn_like(batch["action"])).clamp(-NOISE_CLIP, NOISE_CLIP)
                next_action = (target_actor(batch["next_obs"]) + wobble).clamp(-1.0, 1.0)
                next_value = torch.minimum(*target_critics(batch["next_obs"], next_action))
                target = batch["reward"] + batch["discount"] * (~batch["terminated"]) * next_value
            first, second = critics(batch["obs"], batch["action"])
            critic_loss = (first - target).square().mean() + (second - target).square().mean()
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            if update % POLICY_DELAY == 0:
                actor_loss = -critics(batch["obs"], actor(batch["obs"]))[0].mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
            with torch.no_grad():
                for slow, fast in ((target_actor, actor), (target_critics, critics)):
                    for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
                        old.lerp_(new, TARGET_RATE)
    replay.check()  # reports invalid data that was counted on the device
    return history


def plot(path: Path, history: list[tuple[int, float]], title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only --plot needs it)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="transitions", ylabel="mean reward of a step")
    axes.plot(*zip(*history, strict=True), color="tab:blue", linewidth=2)
    axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="TD3 on thousands of environments of one device.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=2048)
    parser.add_argument("--total-steps", type=int, default=600, help="steps of every environment")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, default=None, help="save the learning curve here (needs matplotlib)")
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    curve = train(args.seed, args.num_envs, args.total_steps, torch.device(args.device))
    print(f"mean reward of a step: {curve[0][1]:.3f} at first, {curve[-1][1]:.3f} at last")
    if args.plot:
        plot(args.plot, curve, f"TD3 on {args.num_envs:,} darts, seed {args.seed}")
