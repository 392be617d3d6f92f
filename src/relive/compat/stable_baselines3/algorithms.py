# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""DQN, SAC and TD3 that learn from prioritised replay: weighted critic losses, and TD errors as new priorities.

Stable-Baselines3's own `train` neither reads weights nor tells errors. These do the same updates with both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from stable_baselines3.common.utils import polyak_update
from stable_baselines3.common.vec_env import VecNormalize

from relive.compat.stable_baselines3.defaults import DQN, SAC, TD3
from relive.compat.stable_baselines3.prioritized import PrioritizedReplayBuffer, PrioritizedReplayBufferSamples
from relive.errors import SchemaError, explain


class _OnPriorities:
    """What the algorithms share: the buffer, how they draw from it and what they tell it; the order of an update."""

    _current_progress_remaining: float
    _vec_normalize_env: VecNormalize | None
    _n_updates: int
    _update_learning_rate: Any
    replay_buffer: Any
    policy: Any
    logger: Any
    tau: float

    def __init__(
        self, *args: Any, replay_buffer_class: type[PrioritizedReplayBuffer] = PrioritizedReplayBuffer, **kwargs: Any
    ) -> None:
        kwargs["replay_buffer_class"] = replay_buffer_class
        super().__init__(*args, **kwargs)

    @abstractmethod
    def _optimizers(self) -> list[Any]:
        """Those that follow the schedule of the learning rate."""

    @abstractmethod
    def _update(self, batch: PrioritizedReplayBufferSamples, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Learn from a batch, the `step`th of this call; yields what is logged."""

    def _learn(self, gradient_steps: int, batch_size: int) -> None:
        """What `train` does."""
        self._require_priorities()
        self.policy.set_training_mode(mode=True)
        self._update_learning_rate(self._optimizers())
        logged: dict[str, list[float]] = {}
        for step in range(gradient_steps):
            self._n_updates += 1
            for name, value in self._update(self._draw(batch_size), step):
                logged.setdefault(name, []).append(value.item())
        beta = self.replay_buffer.beta(self._current_progress_remaining)
        self.logger.record("train/beta", beta)
        for name, numbers in logged.items():
            self.logger.record(f"train/{name}", np.mean(numbers))
        self.logger.record("train/n_updates", self._n_updates, "tensorboard")

    def _require_priorities(self) -> None:
        """Raise for a buffer that has none, such as one that another algorithm saved."""
        if not hasattr(self.replay_buffer, "update_priorities"):
            got, remedy = f"a {type(self.replay_buffer).__name__}", "Load one that a prioritized algorithm saved."
            raise SchemaError(explain("replay_buffer", "a PrioritizedReplayBuffer", got, remedy))

    def _draw(self, batch_size: int) -> PrioritizedReplayBufferSamples:
        self.replay_buffer.progress_remaining = self._current_progress_remaining
        return self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)

    def _tell(
        self, batch: PrioritizedReplayBufferSamples, values: Sequence[torch.Tensor], target: torch.Tensor
    ) -> None:
        """The critics' mean absolute TD errors are the rows' new priorities."""
        errors = (torch.cat(tuple(values), 1) - target).abs().mean(1)
        self.replay_buffer.update_priorities(batch.indices, errors)

    def _follow(self, *names: str) -> None:
        """Move target networks towards the networks of these names, and copy their statistics."""
        for name in names:
            online, target = (getattr(self, each) for each in (name, f"{name}_target"))
            polyak_update(online.parameters(), target.parameters(), self.tau)
            prefix = "" if isinstance(self, SAC) else f"{name}_"
            statistics = (getattr(self, f"{prefix}batch_norm_stats{each}") for each in ("", "_target"))
            polyak_update(*statistics, tau=1)


class PrioritizedDQN(_OnPriorities, DQN):
    """DQN on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self._learn(gradient_steps, batch_size)

    def _optimizers(self) -> list[Any]:
        return [self.policy.optimizer]

    def _update(self, batch: PrioritizedReplayBufferSamples, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            next_value = self.q_net_target(batch.next_observations).amax(1, keepdim=True)
            target = _target(batch, next_value, self.gamma)
        value = self.q_net(batch.observations).gather(1, batch.actions.long())
        loss = (batch.weights * F.smooth_l1_loss(value, target, reduction="none")).mean()
        _descend(self.policy.optimizer, loss, self.policy.parameters(), self.max_grad_norm)
        self._tell(batch, [value], target)
        yield "loss", loss


class PrioritizedSAC(_OnPriorities, SAC):
    """SAC on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        self._learn(gradient_steps, batch_size)

    def _optimizers(self) -> list[Any]:
        every = self.actor.optimizer, self.critic.optimizer, self.ent_coef_optimizer
        return [optimizer for optimizer in every if optimizer is not None]

    def _update(self, batch: PrioritizedReplayBufferSamples, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        if self.use_sde:
            self.actor.reset_noise()
        action, log_prob = self.actor.action_log_prob(batch.observations)
        temperature = self._temperature(log_prob.detach())
        yield "ent_coef", temperature
        yield "critic_loss", self._improve_critic(batch, temperature)
        best = torch.cat(self.critic(batch.observations, action), 1).amin(1)
        actor_loss = (temperature * log_prob.flatten() - best).mean()
        _descend(self.actor.optimizer, actor_loss)
        yield "actor_loss", actor_loss
        if step % self.target_update_interval == 0:
            self._follow("critic")

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
            next_value = next_values.amin(1, keepdim=True) - temperature * next_log_prob.unsqueeze(1)
            target = _target(batch, next_value, self.gamma)
        values = self.critic(batch.observations, batch.actions)
        loss = 0.5 * _squared(batch, values, target)
        _descend(self.critic.optimizer, loss)
        self._tell(batch, values, target)
        return loss


class PrioritizedTD3(_OnPriorities, TD3):
    """TD3 on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self._learn(gradient_steps, batch_size)

    def _optimizers(self) -> list[Any]:
        return [network.optimizer for network in (self.actor, self.critic)]

    def _update(self, batch: PrioritizedReplayBufferSamples, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield "critic_loss", self._improve_critic(batch)
        if not self._n_updates % self.policy_delay:
            yield "actor_loss", self._improve_actor(batch)

    def _improve_critic(self, batch: PrioritizedReplayBufferSamples) -> torch.Tensor:
        with torch.no_grad():
            limit = self.target_noise_clip
            noise = (torch.randn_like(batch.actions) * self.target_policy_noise).clamp(-limit, limit)
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
        self._follow("critic", "actor")
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
