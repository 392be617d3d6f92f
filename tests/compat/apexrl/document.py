"""The code blocks of ApexRL's documentation of buffers, and a world in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ROLLOUT_BLOCK = """
from apexrl.buffer.rollout_buffer import RolloutBuffer

buffer = RolloutBuffer(
    num_envs=4096,
    num_steps=24,
    obs_shape=(48,),
    device="cuda",
    num_privileged_obs=0,
)

# Collect data
for step in range(24):
    actions, log_probs = actor.act(obs)
    next_obs, rewards, dones, extras = env.step(actions)
    values = critic.get_value(obs)

    buffer.add(
        observations=obs,
        privileged_observations=None,
        actions=actions,
        rewards=rewards,
        dones=dones.float(),
        values=values,
        log_probs=log_probs,
    )

    obs = next_obs

# Compute advantages
last_values = critic.get_value(obs)
buffer.compute_returns_and_advantages(
    last_values=last_values,
    gamma=0.99,
    gae_lambda=0.95,
)

# Get training data
data = buffer.get_all_data()
"""

LAYOUT_BLOCK = """
# Observations: (num_steps, num_envs, *obs_shape)
self.observations  # Shape: (24, 4096, 48)

# Scalars: (num_steps, num_envs)
self.rewards       # Shape: (24, 4096)
self.dones         # Shape: (24, 4096)
self.values        # Shape: (24, 4096)
self.log_probs     # Shape: (24, 4096)
self.advantages    # Shape: (24, 4096)
self.returns       # Shape: (24, 4096)
"""

GAE_BLOCK = """
def compute_returns_and_advantages(self, last_values, gamma=0.99, gae_lambda=0.95):
    advantages = torch.zeros_like(self.rewards)
    last_gae = torch.zeros(self.num_envs, device=self.device)

    for t in reversed(range(self.num_steps)):
        if t == self.num_steps - 1:
            next_values = last_values
        else:
            next_values = self.values[t + 1]

        delta = self.rewards[t] + gamma * next_values * (1 - self.dones[t]) - self.values[t]
        last_gae = delta + gamma * gae_lambda * (1 - self.dones[t]) * last_gae
        advantages[t] = last_gae

    self.advantages = advantages
    self.returns = advantages + self.values
"""

REPLAY_BLOCK = """
from apexrl.buffer.replay_buffer import ReplayBuffer

buffer = ReplayBuffer(
    capacity=1_000_000,
    obs_shape=(4,),
    action_shape=(2,),
    device="cuda",
)

# Store transition
buffer.add(obs, action, reward, next_obs, done)

# Sample batch
batch = buffer.sample(batch_size=256)
"""

DISTILLATION_BLOCK = """
from apexrl.buffer.distillation_buffer import DistillationBuffer

buffer = DistillationBuffer(
    capacity=100_000,
    obs_shape=(48,),
    device="cuda",
)

# Store expert demonstration
buffer.add(obs, action)

# Sample for distillation
obs, expert_actions = buffer.sample(batch_size=256)
"""


def run(block: str, **names: Any) -> dict[str, Any]:
    """Run a code block with our prefix before its imports; without CUDA on the CPU. Return its variables."""
    code = block.replace("from apexrl.", "from relive.compat.apexrl.")
    exec(code.replace('device="cuda"', f'device="{DEVICE}"'), names)
    return names


def documented_gae(
    rewards: torch.Tensor, dones: torch.Tensor, values: torch.Tensor, last_values: torch.Tensor, **rates: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and returns [T, N] with ApexRL's documented code."""
    buffer = SimpleNamespace(rewards=rewards, dones=dones, values=values)
    buffer.num_steps, buffer.num_envs, buffer.device = *rewards.shape, rewards.device
    run(GAE_BLOCK, torch=torch)["compute_returns_and_advantages"](buffer, last_values, **rates)
    return buffer.advantages, buffer.returns


@dataclass
class World:
    """The actor, critic and environment of ApexRL's documentation; observations are t + environment / 8192."""

    num_envs: int
    num_obs: int
    time: int = 0
    in_place: bool = False

    def __post_init__(self) -> None:
        self.obs = self._make_obs()

    def _make_obs(self) -> torch.Tensor:
        ids = torch.arange(self.num_envs, device=DEVICE)
        return (self.time + ids / 8192).unsqueeze(1).expand(-1, self.num_obs).clone()

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return obs[:, :12] + 0.5, -obs[:, 0]

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        return obs[:, 0].clone().requires_grad_() * 2

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.time += 1
        self.obs = self.obs.copy_(self._make_obs()) if self.in_place else self._make_obs()
        dones = torch.arange(self.num_envs, device=DEVICE) % 7 == self.time % 7
        return self.obs, actions[:, 0] * 10, dones, {}
