"""Clone a policy of action chunks from demonstrations that pass obstacles on either side.

    python examples/action_chunks.py       # half a minute: 97 % of the roads, and 60 % with single actions

A car drives along a road with pillars in the middle. Every demonstrator passes each pillar on the left or on the right,
as it likes. For the first metres nothing shows which side it will be: the car's place is observed, but not its wheels,
which turn slowly. A policy that chooses one action at a time changes its mind meanwhile, and hits pillars. One that
chooses a chunk of actions, half of the way from one pillar to the next, stays with its choice. The task is made to show
this: with chunks that end elsewhere than at the pillars most of the gain is gone.
`rl.Window(action=range(h))` gives the chunks, and "action_mask" says which of their actions were really done:
chunks are shorter at the end of a road.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn

import relive as rl

PILLARS, STEPS_PER_PILLAR, PILLAR_AT, RADIUS, ROAD = 4, 24, 10, 0.3, 1.5
# A car moves sideways by SPEED times the angle of its wheels, which keep LAG of their old angle, and by the WIND.
SPEED, LAG, WIND = 0.08, 0.7, 0.03
DEMONSTRATIONS, CHUNK, MODES, BATCH_SIZE, UPDATES = 400, 12, 2, 256, 3_000
SPREAD = 0.3
"""Standard deviation of the noise in a demonstrator's actions."""
COURSES = 500
"""Number of roads in an evaluation."""


class Road:
    """Many cars at once. Each drives on at a steady speed; its action is how far it steers, from -1 to 1."""

    def __init__(self, num_cars: int, rng: np.random.Generator) -> None:
        self.rng, self.time = rng, 0
        self.place, self.wheels = rng.normal(0, 0.1, num_cars), np.zeros(num_cars)
        self.has_crashed = np.zeros(num_cars, bool)

    @property
    def obs(self) -> np.ndarray:
        """Observation: distance from the middle, and distance since the last pillar."""
        way = np.full_like(self.place, self.time % STEPS_PER_PILLAR / STEPS_PER_PILLAR)
        return np.stack([self.place, way], 1).astype(np.float32)

    @property
    def is_over(self) -> bool:
        return self.time == PILLARS * STEPS_PER_PILLAR

    def step(self, action: np.ndarray) -> None:
        self.time += 1
        self.wheels = LAG * self.wheels + (1 - LAG) * np.clip(action, -1, 1)
        self.place = self.place + SPEED * self.wheels + self.rng.normal(0, WIND, len(self.place))
        if self.time % STEPS_PER_PILLAR == PILLAR_AT:
            self.has_crashed |= np.abs(self.place) < RADIUS
        self.has_crashed |= np.abs(self.place) > ROAD


def demonstrate(num_cars: int, seed: int) -> rl.ReplayBuffer:
    """Drive along the road, past each pillar on a random side, and record observations and actions."""
    rng = np.random.default_rng(seed)
    road = Road(num_cars, rng)
    steps = PILLARS * STEPS_PER_PILLAR
    replay = rl.ReplayBuffer((steps + 1) * num_cars, obs=2, action=1, num_envs=num_cars, seed=seed)
    nothing, side = np.zeros(num_cars, bool), np.zeros(num_cars)
    while not road.is_over:
        since = road.time % STEPS_PER_PILLAR
        if since == 0:
            side = rng.choice([-1.0, 1.0], num_cars)
        # Away from the middle until the pillar, then back.
        steer = side if since < PILLAR_AT else -(road.place / SPEED + 2 * road.wheels) / 3
        obs, action = road.obs, np.clip(steer, -1, 1)[:, None].astype(np.float32)
        road.step(action[:, 0])
        ended = np.full(num_cars, road.is_over)
        replay.add(obs, action, nothing.astype(np.float32), nothing, ended, road.obs)
    return replay


class ChunkPolicy(nn.Module):
    """Predicts several chunks of actions for an observation, and the probability of each."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        hidden = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(64, MODES * (1 + chunk)))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the chunks' probabilities [B, modes], and the chunks [B, modes, chunk]."""
        logits, actions = self.net(obs).split([MODES, MODES * self.chunk], -1)
        return logits.log_softmax(-1), actions.view(-1, MODES, self.chunk)

    def loss(self, obs: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        """Return negative log-likelihood of chunks [B, chunk, 1], over the actions in `mask`."""
        log_prob, chunks = self(obs)
        error = ((chunks - action.transpose(1, 2)).square() * mask.unsqueeze(1)).sum(-1)
        return -(log_prob - error / (2 * SPREAD**2)).logsumexp(-1).mean()

    @torch.no_grad()
    def choose(self, obs: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Return a chunk [B, chunk] for each observation."""
        log_prob, chunks = self(torch.from_numpy(obs))
        mode = torch.multinomial(log_prob.exp(), 1, generator=generator).squeeze(1)
        return chunks[torch.arange(len(chunks)), mode].numpy()


def score(policy: ChunkPolicy, seed: int) -> float:
    """Return the share of roads that are driven to their end, with every chunk executed whole."""
    road, generator = Road(COURSES, np.random.default_rng(seed)), torch.Generator().manual_seed(seed)
    while not road.is_over:
        for action in policy.choose(road.obs, generator).T[: PILLARS * STEPS_PER_PILLAR - road.time]:
            road.step(action)
    return float(1 - road.has_crashed.mean())


def train(seed: int, updates: int = UPDATES, chunk: int = CHUNK) -> list[float]:
    """Clone a policy; return its scores, measured ten times."""
    torch.manual_seed(seed)
    replay, policy = demonstrate(DEMONSTRATIONS, seed), ChunkPolicy(chunk)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    window, scores = rl.Window(action=range(chunk)), []
    for update in range(updates):
        batch = replay.sample(BATCH_SIZE, window)
        loss = policy.loss(batch["obs"], batch["action"], batch["action_mask"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (update + 1) % max(updates // 10, 1) == 0:
            scores.append(score(policy, 1000 + seed))
            print(f"chunks of {chunk:2}   {update + 1:6,} updates   loss {loss:7.3f}   {scores[-1]:6.1%} of the roads")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Clone action chunks, and single actions beside them.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=UPDATES)
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks run fastest on one core
    single, chunks = (train(args.seed, args.updates, chunk)[-1] for chunk in (1, CHUNK))
    print(f"chunks of {CHUNK}: {chunks:.1%} of the roads, single actions: {single:.1%}")
