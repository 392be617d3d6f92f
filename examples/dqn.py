"""Deep Q-learning in one file: prioritized, 3-step, double, on CartPole-v1 in a minute or two.

    python examples/dqn.py
    python examples/dqn.py --seed 2 --plot cartpole.png

The sampler belongs to the buffer; the view is an argument of `sample`. The target is the same for every view:
reward + discount · (1 − terminated) · Q(next_obs). A time limit does not stop the bootstrap: only `terminated` does,
and `next_obs` is the state before any reset.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import relive as rl

NUM_ENVS, CAPACITY, LEARNING_STARTS, BATCH_SIZE = 2, 20_000, 1_000, 128
GAMMA, N_STEP, LEARNING_RATE, TARGET_RATE, MAX_GRAD_NORM = 0.99, 3, 1e-3, 0.01, 10.0
# During the first fifth of the training, epsilon falls from 1 to its last value.
EXPLORATION, LAST_EPSILON = 0.2, 0.02


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prioritized 3-step double DQN on CartPole-v1.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=50_000, help="environment steps")
    parser.add_argument("--plot", type=Path, default=None, help="save the learning curve here (needs matplotlib)")
    return parser.parse_args()


def q_network(num_inputs: int, num_actions: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_actions)
    )


def q_of(net: nn.Module, obs: Tensor, action: Tensor) -> Tensor:
    return net(obs).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def train(seed: int, total_steps: int) -> list[tuple[int, float]]:
    """Train and return the episodes: (step at which it ended, return)."""
    env = gym.make_vec("CartPole-v1", NUM_ENVS, "sync")
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = q_network(4, 2)
    target_net = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)

    # Importance weights correct fully (beta = 1) only at the end, when the values have settled.
    sampler = rl.Prioritized(alpha=0.6, beta=rl.Linear(0.4, 1.0, draws=total_steps // NUM_ENVS))
    stats = rl.EpisodeStats(NUM_ENVS, window=total_steps)  # keeps every episode
    replay = rl.ReplayBuffer.for_env(env, CAPACITY, sampler=sampler, stats=stats, seed=seed)
    view = rl.NStep(N_STEP, GAMMA)

    obs, _ = env.reset(seed=seed)
    for num_steps in range(0, total_steps, NUM_ENVS):
        # Act.
        epsilon = max(1.0 - num_steps / (EXPLORATION * total_steps), LAST_EPSILON)
        with torch.no_grad():
            greedy = net(torch.as_tensor(obs)).argmax(-1).numpy()
        action = np.where(rng.random(NUM_ENVS) < epsilon, rng.integers(2, size=NUM_ENVS), greedy)
        step = env.step(action)
        replay.add_step(obs, action, step)
        obs = step[0]

        if num_steps % 5_000 == 0 and stats.num_episodes:
            recent = stats.episodes()["return"][-20:]
            print(f"{num_steps:7,} steps   mean return of the last {len(recent)} episodes {recent.mean():6.1f}")
        if len(replay) < LEARNING_STARTS:
            continue

        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - num_steps / total_steps)
        # Learn. Double: one network chooses the next action, the other evaluates it.
        batch = replay.sample(BATCH_SIZE, view)
        with torch.no_grad():
            next_action = net(batch["next_obs"]).argmax(-1)
            bootstrap = batch["discount"] * (~batch["terminated"]) * q_of(target_net, batch["next_obs"], next_action)
            target = batch["reward"] + bootstrap
        q = q_of(net, batch["obs"], batch["action"])
        loss = (batch["weight"] * functional.smooth_l1_loss(q, target, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        replay.update_priority(batch["index"], (target - q).abs())
        with torch.no_grad():
            for slow, fast in zip(target_net.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
    env.close()
    episodes = stats.episodes()
    return list(zip(episodes["step"].tolist(), episodes["return"].tolist(), strict=True))


def plot(path: Path, episodes: list[tuple[int, float]], title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only --plot needs it)

    steps, returns = np.array(episodes).T
    window = np.ones(min(20, len(returns)))
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
    returns = [return_ for _, return_ in history[-20:]]
    print(f"mean return of the last {len(returns)} of {len(history)} episodes: {np.mean(returns):.1f}")
    if args.plot:
        plot(args.plot, history, f"Prioritized 3-step double DQN on CartPole-v1, seed {args.seed}")
