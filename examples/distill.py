"""A student that sees little learns from a teacher that sees everything: PPO for the teacher, DAgger for the student.

    python examples/distill.py       # CartPole-v1, about a minute

The teacher sees the whole state. The student sees only the last few positions and has to infer the velocities. In each
round a mixture of both acts, and the teacher labels the visited states. `DistillationBuffer` stores the teacher's
logits with their round, chooses who acts, and returns the rows of all rounds in epochs.
"""

from __future__ import annotations

import argparse
import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

import relive as rl

NUM_ENVS, GAMMA, LAM, CLIP = 8, 0.98, 0.9, 0.2
TEACHER_STEPS, NUM_STEPS, TEACHER_EPOCHS, BATCH_SIZE, LEARNING_RATE = 100_000, 64, 8, 256, 1e-3
NUM_FRAMES = 4
"""Number of frames in an observation of the student."""
ROUNDS, ROUND_STEPS, STUDENT_EPOCHS = 8, 250, 8
EPISODES = 50
"""Number of episodes in a mean return."""

Obs = dict[str, Any]


class Positions(gym.ObservationWrapper[Obs, np.int64, np.ndarray]):
    """CartPole with two observations: "state" is complete, "seen" has the last positions without velocities."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        seen = gym.spaces.Box(-np.inf, np.inf, (NUM_FRAMES, 2), np.float32)
        self.observation_space = gym.spaces.Dict({"state": self.env.observation_space, "seen": seen})
        self.frames: deque[np.ndarray] = deque(maxlen=NUM_FRAMES)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        self.frames.clear()
        return super().reset(seed=seed, options=options)

    def observation(self, observation: np.ndarray) -> Obs:
        # The first frame of an episode also stands for the frames before it.
        new = NUM_FRAMES if not self.frames else 1
        self.frames.extend([observation[[0, 2]]] * new)
        return {"state": observation, "seen": np.stack(self.frames)}


def make(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([Positions] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def mlp(num_inputs: int, num_outputs: int, width: int = 64) -> nn.Sequential:
    layers = [
        nn.Linear(num_inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, num_outputs),
    ]
    return nn.Sequential(nn.Flatten(), *layers)


class Teacher(nn.Module):
    """A policy and a critic that see the whole state."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(4, 2), mlp(4, 1)

    def value(self, obs: Any) -> Tensor:
        return self.critic(torch.as_tensor(obs["state"])).squeeze(-1)

    def forward(self, obs: Any) -> Tensor:
        return self.actor(torch.as_tensor(obs["state"]))


class Student(nn.Module):
    """A smaller policy that sees positions only."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(2 * NUM_FRAMES, 2, width=32)

    def forward(self, obs: Any) -> Tensor:
        # The angles are small: ten times as large, they are a better input.
        return self.actor(10.0 * torch.as_tensor(obs["seen"]))


def train_teacher(seed: int, total_steps: int) -> Teacher:
    """Train the teacher with PPO, as in ppo.py."""
    env, stats = make(NUM_ENVS), rl.EpisodeStats(NUM_ENVS)
    teacher = Teacher()
    optimizer = torch.optim.Adam(teacher.parameters(), LEARNING_RATE, eps=1e-5)
    rollout = rl.RolloutBuffer.for_env(env, NUM_STEPS, stats=stats, seed=seed)
    obs, _ = env.reset(seed=seed)
    while stats.num_steps < total_steps:
        rollout.clear()
        while not rollout.is_full:
            with torch.no_grad():
                policy, value = Categorical(logits=teacher(obs)), teacher.value(obs)
                action = policy.sample()
            step = env.step(action.numpy())
            rollout.add_step(obs, action, step, value=value, log_prob=policy.log_prob(action))
            obs = step[0]
        with torch.no_grad():
            last_value, final_value = teacher.value(obs), teacher.value(rollout.final_obs)
        rollout.compute_advantage(last_value, final_value=final_value, gamma=GAMMA, lam=LAM)

        optimizer.param_groups[0]["lr"] = LEARNING_RATE * max(1.0 - stats.num_steps / total_steps, 0.05)
        for batch in rollout.minibatches(BATCH_SIZE, epochs=TEACHER_EPOCHS):
            policy = Categorical(logits=teacher(batch["obs"]))
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
            advantage = rl.normalize(batch["advantage"])
            policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantage).mean()
            value_loss = (teacher.value(batch["obs"]) - batch["return"]).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_(teacher.parameters(), 0.5)
            optimizer.step()
        if stats.num_steps % (20 * NUM_STEPS * NUM_ENVS) == 0 and stats.num_episodes:
            print(f"teacher  {stats.num_steps:8,} steps   mean return {stats.summary()['return_mean']:6.1f}")
    env.close()
    return teacher


def distill(seed: int, teacher: Teacher, rounds: int) -> Student:
    """Run DAgger: the teacher acts alone in the first round, and half as often in each later round.

    Students of different rounds differ; the best one is returned.
    """
    env, student = make(NUM_ENVS), Student()
    optimizer = torch.optim.Adam(student.parameters(), 3e-3)
    buffer = rl.DistillationBuffer(
        50_000, {"seen": (NUM_FRAMES, 2)}, env.single_action_space, extra={"logits": 2}, seed=seed
    )
    best, reached = student, []
    obs, _ = env.reset(seed=seed + 1)
    for _ in range(rounds):
        for _ in range(ROUND_STEPS):
            with torch.no_grad():
                logits = teacher(obs)
                label, guess = logits.argmax(-1), student(obs).argmax(-1)
            buffer.add({"seen": obs["seen"]}, label, logits=logits)
            action = buffer.mix(label, guess, beta=lambda round: 0.5**round)
            obs = env.step(action.numpy())[0]
        for batch in buffer.epochs(BATCH_SIZE, epochs=STUDENT_EPOCHS):
            said, meant = Categorical(logits=student(batch["obs"])), Categorical(logits=batch["logits"])
            loss = kl_divergence(meant, said).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached.append(score(student, seed + 1))
        if reached[-1] == max(reached):
            best = copy.deepcopy(student)
        print(f"student  round {buffer.round}   {len(buffer):6,} rows   mean return {reached[-1]:6.1f}")
        buffer.next_round()
    env.close()
    return best


def score(policy: Callable[[Any], Tensor], seed: int) -> float:
    """Return the mean return of the greedy policy over the first episodes of many environments."""
    env, stats = make(EPISODES), rl.EpisodeStats(EPISODES)
    obs, _ = env.reset(seed=1000 * seed)
    running = np.ones(EPISODES, bool)
    while running.any():
        with torch.no_grad():
            action = policy(obs).argmax(-1).numpy()
        obs, reward, terminated, truncated, _ = env.step(action)
        stats.update(reward, terminated, truncated, mask=running)
        running &= ~(terminated | truncated)
    env.close()
    return stats.summary()["return_mean"]


def run(seed: int, teacher_steps: int = TEACHER_STEPS, rounds: int = ROUNDS) -> tuple[float, float]:
    """Train teacher and student and return their scores."""
    torch.manual_seed(seed)
    teacher = train_teacher(seed, teacher_steps)
    student = distill(seed, teacher, rounds)
    return score(teacher, seed), score(student, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Distil a CartPole teacher into a student that sees no velocities.")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    teacher_return, student_return = run(args.seed)
    share = student_return / teacher_return
    print(f"teacher {teacher_return:.1f}, student {student_return:.1f}: {share:.1%} of the teacher's return")
