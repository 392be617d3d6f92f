"""Double DQN on an Atari game with frames stored once: 7 KB per transition instead of 56.

    pip install "gymnasium[atari]" opencv-python-headless
    python examples/atari_dqn.py            # a smoke run: half a minute, nothing is learned
    python examples/atari_dqn.py --env-id ALE/Pong-v5 --total-steps 2000000 --capacity 200000 --learning-starts 20000

The environment gives stacks of four 84 x 84 frames. `Stacked` stores single frames and rebuilds the stacks when they
are sampled, padded at episode starts as the wrapper pads them; `add` refuses a stack that it could not rebuild.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from torch import Tensor, nn
from torch.nn import functional

import relive as rl

NUM_FRAMES, BATCH_SIZE, TRAIN_EVERY, SYNC_EVERY = 4, 32, 4, 8_000
GAMMA, LEARNING_RATE, LAST_EPSILON = 0.99, 1e-4, 0.05


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Double DQN on an Atari game.")
    parser.add_argument("--env-id", default="ALE/Breakout-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=1_000, help="environment steps, of four frames each")
    parser.add_argument("--capacity", type=int, default=10_000)
    parser.add_argument("--learning-starts", type=int, default=200)
    return parser.parse_args()


def make_env(env_id: str) -> gym.Env[np.ndarray, np.int64]:
    try:
        import ale_py  # noqa: PLC0415 (the message says what to install)
        import cv2  # noqa: F401, PLC0415 (the preprocessing needs it)
    except ImportError as missing:
        sys.exit(f'{missing}. Run: pip install "gymnasium[atari]" opencv-python-headless')
    gym.register_envs(ale_py)
    # The preprocessing skips frames itself, so that it can take the maximum of the last two.
    env = AtariPreprocessing(gym.make(env_id, frameskip=1), terminal_on_life_loss=True)
    return FrameStackObservation(env, NUM_FRAMES)


class QNetwork(nn.Module):
    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(NUM_FRAMES, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, num_actions),
        )

    def forward(self, frames: Tensor) -> Tensor:
        return self.layers(frames / 255.0)


def train(env_id: str, seed: int, total_steps: int, capacity: int, learning_starts: int) -> dict[str, float]:
    """Train and return what was measured: bytes per transition, milliseconds per sample and the number of lives."""
    env = make_env(env_id)
    assert isinstance(env.action_space, gym.spaces.Discrete)
    num_actions = int(env.action_space.n)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = QNetwork(num_actions)
    target_net = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)
    # The wrapper puts the frames first and repeats an episode's first one.
    frames = rl.Stacked(rl.Field((84, 84), torch.uint8), NUM_FRAMES, axis=0, pad="repeat")
    replay = rl.ReplayBuffer.for_env(env, capacity, obs=frames, seed=seed)
    print(f"{capacity:,} transitions in {replay.nbytes / 2**20:,.0f} MiB, {replay.nbytes / capacity:,.0f} bytes each")

    stats = rl.EpisodeStats(None)
    sample_times: list[float] = []
    obs, _ = env.reset(seed=seed)
    for num_steps in range(1, total_steps + 1):
        # Act. Rewards are clipped for learning, not for counting.
        epsilon = max(1.0 - num_steps / (0.1 * total_steps), LAST_EPSILON)
        if num_steps <= learning_starts or rng.random() < epsilon:
            action = rng.integers(num_actions)
        else:
            with torch.no_grad():
                action = net(torch.as_tensor(obs).unsqueeze(0)).argmax().numpy()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        replay.add(obs, action, np.sign(float(reward)), terminated, truncated, next_obs)
        stats.update(reward, terminated, truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs

        # Learn.
        if num_steps > learning_starts and num_steps % TRAIN_EVERY == 0:
            started = time.perf_counter()
            batch = replay.sample(BATCH_SIZE)
            sample_times.append(time.perf_counter() - started)
            with torch.no_grad():
                best = net(batch["next_obs"]).argmax(-1, keepdim=True)
                next_value = target_net(batch["next_obs"]).gather(-1, best).squeeze(-1)
                target = batch["reward"] + GAMMA * (~batch["terminated"]) * next_value
            q = net(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
            optimizer.zero_grad()
            functional.smooth_l1_loss(q, target).backward()
            optimizer.step()
        if num_steps % SYNC_EVERY == 0:
            target_net.load_state_dict(net.state_dict())
        if num_steps % max(total_steps // 20, 100) == 0 and stats.num_episodes:
            mean = stats.summary()["return_mean"]
            print(f"{num_steps:9,} steps   {stats.num_episodes:5} lives   mean return of a life {mean:6.2f}")
    env.close()
    return {
        "bytes_per_transition": replay.nbytes / capacity,
        "sample_ms": 1e3 * float(np.median(sample_times)) if sample_times else float("nan"),
        "lives": float(stats.num_episodes),
    }


if __name__ == "__main__":
    args = arguments()
    torch.set_num_threads(1)
    measured = train(args.env_id, args.seed, args.total_steps, args.capacity, args.learning_starts)
    stacked = 2 * NUM_FRAMES * 84 * 84
    print(f"{measured['bytes_per_transition']:,.0f} bytes per transition (two stacks as they are: {stacked:,})")
    print(f"{measured['sample_ms']:.2f} ms for a batch of {BATCH_SIZE} (median)")
