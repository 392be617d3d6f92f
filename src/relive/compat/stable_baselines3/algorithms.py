# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""DQN, SAC and TD3 that learn from prioritised replay: weighted critic losses, and TD errors as new priorities.

Stable-Baselines3's own `train` neither reads weights nor tells errors. These do the same updates with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from stable_baselines3.common.utils import polyak_update
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.dqn import DQN
from stable_baselines3.sac import SAC
from stable_baselines3.td3 import TD3

from relive.compat.stable_baselines3.prioritized import PrioritizedReplayBuffer, PrioritizedReplayBufferSamples


class _OnPriorities:
    """What the algorithms share: the buffer, how they draw from it and what they tell it."""

    _current_progress_remaining: float
    _vec_normalize_env: VecNormalize | None
    _n_updates: int
    replay_buffer: Any
    logger: Any

    def __init__(
        self, *args: Any, replay_buffer_class: type[PrioritizedReplayBuffer] = PrioritizedReplayBuffer, **kwargs: Any
    ) -> None:
        kwargs["replay_buffer_class"] = replay_buffer_class
        super().__init__(*args, **kwargs)

    def _draw(self, batch_size: int) -> PrioritizedReplayBufferSamples:
        self.replay_buffer.progress_remaining = self._current_progress_remaining
        return self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)

    def _tell(
        self, batch: PrioritizedReplayBufferSamples, values: Sequence[torch.Tensor], target: torch.Tensor
    ) -> None:
        """The critics' mean absolute TD errors are the rows' new priorities."""
        errors = (torch.cat(tuple(values), 1) - target).abs().mean(1)
        self.replay_buffer.update_priorities(batch.indices, errors)

    def _record(self, **values: list[float]) -> None:
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/beta", self.replay_buffer.beta(self._current_progress_remaining))
        for name, numbers in values.items():
            if numbers:
                self.logger.record(f"train/{name}", np.mean(numbers))


class PrioritizedDQN(_OnPriorities, DQN):
    """DQN on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        losses = []
        for _ in range(gradient_steps):
            batch = self._draw(batch_size)
            with torch.no_grad():
                next_value = self.q_net_target(batch.next_observations).amax(1, keepdim=True)
                target = _target(batch, next_value, self.gamma)
            value = self.q_net(batch.observations).gather(1, batch.actions.long())
            loss = (batch.weights * F.smooth_l1_loss(value, target, reduction="none")).mean()
            _descend(self.policy.optimizer, loss, self.policy.parameters(), self.max_grad_norm)
            self._tell(batch, [value], target)
            losses.append(loss.item())
        self._n_updates += gradient_steps
        self._record(loss=losses)


class PrioritizedSAC(_OnPriorities, SAC):
    """SAC on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        self.policy.set_training_mode(True)
        optimizers = [self.actor.optimizer, self.critic.optimizer, self.ent_coef_optimizer]
        self._update_learning_rate([optimizer for optimizer in optimizers if optimizer is not None])
        logged: dict[str, list[float]] = {"ent_coef": [], "critic_loss": [], "actor_loss": []}
        for step in range(gradient_steps):
            batch = self._draw(batch_size)
            if self.use_sde:
                self.actor.reset_noise()
            action, log_prob = self.actor.action_log_prob(batch.observations)
            log_prob = log_prob.reshape(-1, 1)
            temperature = self._temperature(log_prob.detach())
            critic_loss = self._improve_critic(batch, temperature)
            best = torch.cat(self.critic(batch.observations, action), 1).amin(1, keepdim=True)
            actor_loss = (temperature * log_prob - best).mean()
            _descend(self.actor.optimizer, actor_loss)
            if step % self.target_update_interval == 0:
                polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
                polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)
            for values, value in zip(logged.values(), (temperature, critic_loss, actor_loss), strict=True):
                values.append(value.item())
        self._n_updates += gradient_steps
        self._record(**logged)

    def _temperature(self, log_prob: torch.Tensor) -> torch.Tensor:
        """The weight of the entropy for this update; where it is learnt, it learns."""
        if self.ent_coef_optimizer is None or self.log_ent_coef is None:
            return self.ent_coef_tensor
        temperature = self.log_ent_coef.detach().exp()
        _descend(self.ent_coef_optimizer, -(self.log_ent_coef * (log_prob + float(self.target_entropy))).mean())
        return temperature

    def _improve_critic(self, batch: PrioritizedReplayBufferSamples, temperature: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            next_action, next_log_prob = self.actor.action_log_prob(batch.next_observations)
            next_values = torch.cat(self.critic_target(batch.next_observations, next_action), 1)
            next_value = next_values.amin(1, keepdim=True) - temperature * next_log_prob.reshape(-1, 1)
            target = _target(batch, next_value, self.gamma)
        values = self.critic(batch.observations, batch.actions)
        loss = 0.5 * _squared(batch, values, target)
        _descend(self.critic.optimizer, loss)
        self._tell(batch, values, target)
        return loss


class PrioritizedTD3(_OnPriorities, TD3):
    """TD3 on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate([self.actor.optimizer, self.critic.optimizer])
        logged: dict[str, list[float]] = {"critic_loss": [], "actor_loss": []}
        for _ in range(gradient_steps):
            self._n_updates += 1
            batch = self._draw(batch_size)
            logged["critic_loss"].append(self._improve_critic(batch).item())
            if self._n_updates % self.policy_delay == 0:
                logged["actor_loss"].append(self._improve_actor(batch).item())
        self._record(**logged)

    def _improve_critic(self, batch: PrioritizedReplayBufferSamples) -> torch.Tensor:
        with torch.no_grad():
            noise = torch.randn_like(batch.actions) * self.target_policy_noise
            noise = noise.clamp(-self.target_noise_clip, self.target_noise_clip)
            next_action = (self.actor_target(batch.next_observations) + noise).clamp(-1, 1)
            next_values = torch.cat(self.critic_target(batch.next_observations, next_action), 1)
            target = _target(batch, next_values.amin(1, keepdim=True), self.gamma)
        values = self.critic(batch.observations, batch.actions)
        loss = _squared(batch, values, target)
        _descend(self.critic.optimizer, loss)
        self._tell(batch, values, target)
        return loss

    def _improve_actor(self, batch: PrioritizedReplayBufferSamples) -> torch.Tensor:
        loss = -self.critic.q1_forward(batch.observations, self.actor(batch.observations)).mean()
        _descend(self.actor.optimizer, loss)
        for name in ("critic", "actor"):
            online, behind = getattr(self, name), getattr(self, f"{name}_target")
            polyak_update(online.parameters(), behind.parameters(), self.tau)
            statistics = getattr(self, f"{name}_batch_norm_stats")
            polyak_update(statistics, getattr(self, f"{name}_batch_norm_stats_target"), 1.0)
        return loss


def _target(batch: PrioritizedReplayBufferSamples, next_value: torch.Tensor, gamma: float) -> torch.Tensor:
    discount = gamma if batch.discounts is None else batch.discounts
    return batch.rewards + discount * (1 - batch.dones) * next_value


def _squared(
    batch: PrioritizedReplayBufferSamples, values: Sequence[torch.Tensor], target: torch.Tensor
) -> torch.Tensor:
    """Σ over critics of the weighted mean squared error."""
    return (batch.weights * (torch.cat(tuple(values), 1) - target) ** 2).mean(0).sum()


def _descend(optimizer: Any, loss: torch.Tensor, clipped: Any = None, max_norm: float = 0.0) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clipped is not None:
        torch.nn.utils.clip_grad_norm_(clipped, max_norm)
    optimizer.step()
