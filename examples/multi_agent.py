"""PPO for several agents that differ in what they see and do, each with its own rewards, values and advantages.

    python examples/multi_agent.py    # ten seconds

The environment has PettingZoo's parallel interface: dicts by agent, without the agents that are done. The buffer needs
an entry for every agent: an agent that has left gets an observation of zeros with `alive` 0, and reward and value 0
until the episode is over. The loss leaves its rows out.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from relive import EpisodeStats, Field, RolloutBuffer, normalize

LENGTH, TIME_LIMIT = 8, 30
NUM_ENVS, NUM_STEPS, TOTAL_STEPS = 16, 64, 40_000
GAMMA, LAM, EPOCHS, BATCH_SIZE, LEARNING_RATE, CLIP, ENTROPY = 0.95, 0.95, 6, 256, 2e-3, 0.2, 0.01
OBS_SIZES = {"porter": 2, "guest": 3}
"""Size of each agent's observation. Their actions: left, right, and press (porter) or enter (guest)."""
SOLVED = 1.2
"""The return of both agents together if they hardly ever stray; a random policy gets less than -3."""

ByAgent = dict[str, Any]


class House:
    """The porter must find the button that opens the door, the guest must wait at the door and go in.

    Each gets 1 and leaves when done. Pressing elsewhere and entering where it is closed cost 0.2, a step costs 0.03.
    """

    possible_agents = tuple(OBS_SIZES)

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def reset(self) -> tuple[ByAgent, ByAgent]:
        self.agents, self.time, self.is_open = [*self.possible_agents], 0, False
        self.place = {agent: int(self.random.integers(LENGTH)) for agent in self.agents}
        self.goal = {agent: int(self.random.integers(LENGTH)) for agent in self.agents}
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        self.time += 1
        was_open, acted = self.is_open, self.agents
        rewards, terminations = {}, {}
        for agent in acted:
            moves = {0: -1, 1: 1}.get(int(actions[agent]), 0)
            self.place[agent] = min(max(self.place[agent] + moves, 0), LENGTH - 1)
            can = self.place[agent] == self.goal[agent] and (was_open or agent == "porter")
            terminations[agent] = moves == 0 and can
            rewards[agent] = -0.03 + (1.0 if terminations[agent] else -0.2 if moves == 0 else 0.0)
        self.is_open |= terminations.get("porter", False)
        truncations = {agent: self.time >= TIME_LIMIT and not terminations[agent] for agent in acted}
        seen = self._observe()
        self.agents = [agent for agent in acted if not terminations[agent] and not truncations[agent]]
        return seen, rewards, terminations, truncations, {agent: {} for agent in acted}

    def _observe(self) -> ByAgent:
        sees = {agent: [self.place[agent] / LENGTH, self.goal[agent] / LENGTH] for agent in self.agents}
        if "guest" in sees:
            sees["guest"] = [*sees["guest"], float(self.is_open)]
        return {agent: np.array(parts, np.float32) for agent, parts in sees.items()}


def everyone(seen: ByAgent, gone: ByAgent) -> ByAgent:
    """Return an observation for every agent; PettingZoo omits agents that have left, a buffer needs all."""
    here = {agent: agent in seen and not gone.get(agent, False) for agent in OBS_SIZES}
    return {
        agent: {"sees": seen[agent] if here[agent] else np.zeros(size, np.float32), "alive": float(here[agent])}
        for agent, size in OBS_SIZES.items()
    }


def stack(parts: list[Any]) -> Any:
    """Stack a list of dicts, one per environment, into a dict of tensors [N, …]."""
    if isinstance(parts[0], dict):
        return {name: stack([part[name] for part in parts]) for name in parts[0]}
    return torch.as_tensor(np.array(parts, np.float32))


class Team(nn.Module):
    """A policy per agent, which sees what the agent sees, and a critic per agent, which sees what all of them see."""

    def __init__(self) -> None:
        super().__init__()
        everything = sum(OBS_SIZES.values()) + len(OBS_SIZES)
        self.actor = nn.ModuleDict({agent: mlp(size, 3) for agent, size in OBS_SIZES.items()})
        self.critic = nn.ModuleDict({agent: mlp(everything, 1) for agent in OBS_SIZES})

    def policy(self, obs: Any) -> dict[str, Categorical]:
        return {agent: Categorical(logits=self.actor[agent](obs[agent]["sees"])) for agent in OBS_SIZES}

    def value(self, obs: Any) -> dict[str, Tensor]:
        """Return the values [B] of each agent; 0 for an agent that has left."""
        joint = torch.cat([part for a in OBS_SIZES for part in (obs[a]["sees"], obs[a]["alive"].unsqueeze(-1))], -1)
        return {agent: self.critic[agent](joint).squeeze(-1) * obs[agent]["alive"] for agent in OBS_SIZES}


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def train(seed: int, total_steps: int) -> list[float]:
    """Train and return the sum of both agents' returns in each episode, in the order in which they ended."""
    torch.manual_seed(seed)
    envs = [House(seed * NUM_ENVS + i) for i in range(NUM_ENVS)]
    team = Team()
    optimizer = torch.optim.Adam(team.parameters(), LEARNING_RATE)
    # The return of an episode is the sum over both agents. The window is wide enough for every episode.
    stats = EpisodeStats(NUM_ENVS, window=total_steps)
    each = dict.fromkeys(OBS_SIZES, ())
    rollout = RolloutBuffer(
        NUM_STEPS, NUM_ENVS, obs={agent: {"sees": size, "alive": ()} for agent, size in OBS_SIZES.items()},
        action=dict.fromkeys(OBS_SIZES, Field((), torch.int64)), reward=each, value=each, stats=stats, seed=seed,
    )  # fmt: skip

    obs = [everyone(env.reset()[0], {}) for env in envs]
    num_steps = 0
    while num_steps < total_steps:
        # Act.
        rollout.clear()
        while not rollout.is_full:
            now = stack(obs)
            with torch.no_grad():
                policy, value = team.policy(now), team.value(now)
                action = {agent: policy[agent].sample() for agent in OBS_SIZES}
                log_prob = {agent: policy[agent].log_prob(action[agent]) for agent in OBS_SIZES}
            rewards, finals, terminated, truncated = [], [], np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool)
            for i, env in enumerate(envs):
                seen, reward, gone, cut, _ = env.step({agent: action[agent][i] for agent in env.agents})
                rewards.append({agent: reward.get(agent, 0.0) for agent in OBS_SIZES})
                obs[i] = everyone(seen, gone)
                finals.append(obs[i])
                if not env.agents:
                    # The episode is over for both agents: the time limit was reached, or each agent was done.
                    truncated[i], terminated[i] = any(cut.values()), not any(cut.values())
                    obs[i] = everyone(env.reset()[0], {})
            rollout.add(
                now, action, stack(rewards), terminated, truncated,
                value=value, log_prob=log_prob, final_obs=stack(finals),
            )  # fmt: skip
        num_steps += len(rollout)

        # Compute advantages of each agent.
        with torch.no_grad():
            last_value, final_value = team.value(stack(obs)), team.value(rollout.final_obs)
        rollout.compute_advantage(last_value, final_value=final_value, gamma=GAMMA, lam=LAM)
        alive = {agent: rollout["obs", agent, "alive"] > 0 for agent in OBS_SIZES}
        rollout.attach(advantage={a: normalize(rollout["advantage", a], alive[a]) for a in OBS_SIZES})

        # Learn.
        for batch in rollout.minibatches(BATCH_SIZE, epochs=EPOCHS):
            policy, value, loss = team.policy(batch["obs"]), team.value(batch["obs"]), torch.zeros(())
            for agent in OBS_SIZES:
                ratio = (policy[agent].log_prob(batch["action", agent]) - batch["log_prob", agent]).exp()
                advantage, weight = batch["advantage", agent], batch["obs", agent, "alive"]
                gain = torch.minimum(ratio * advantage, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantage)
                error = (value[agent] - batch["return", agent]).square()
                rows = -gain + 0.5 * error - ENTROPY * policy[agent].entropy()
                loss = loss + (rows * weight).sum() / weight.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(team.parameters(), 0.5)
            optimizer.step()
        recent = stats.episodes()["return"][-100:]
        print(f"{num_steps:9,} steps   mean return of the last {len(recent):3} episodes {recent.mean():6.2f}")
    return stats.episodes()["return"].tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO for several agents.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=TOTAL_STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    history = train(args.seed, args.total_steps)
    verdict = "solved" if np.mean(history[-100:]) > SOLVED else f"not yet the {SOLVED} of a solved task"
    print(f"first 50 episodes {np.mean(history[:50]):.2f}, last 100 {np.mean(history[-100:]):.2f}: {verdict}")
