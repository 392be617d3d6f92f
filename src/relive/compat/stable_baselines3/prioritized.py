# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""Prioritized replay, which Stable-Baselines3 lacks: a replay buffer, and DQN, SAC and TD3 that use it.

Stable-Baselines3's own `train` neither reads weights nor reports TD errors. The algorithms here make the same updates
with weighted critic losses, and set the priorities to the TD errors.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule, polyak_update
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from relive.compat.stable_baselines3.algorithms import DQN, SAC, TD3, OffPolicyAlgorithm
from relive.compat.stable_baselines3.replay import ReplayBuffer
from relive.errors import DataWarning, SchemaError, explain
from relive.replay.samplers import Prioritized, Sampler

_RISING_BETA = LinearSchedule(0.4, 1.0, 1.0)

_MAX_BATCHES_WITHOUT_UPDATE = 10
"""Number of batches without an update of priorities before the buffer warns."""


class PrioritizedReplayBufferSamples(NamedTuple):
    """A batch of `PrioritizedReplayBuffer`: the fields of a `ReplayBuffer` batch, importance weights, and row ids."""

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    weights: torch.Tensor
    """Importance weights in (0, 1], [B, 1]."""
    indices: torch.Tensor
    """Row ids, for `update_priorities`."""


class PrioritizedReplayBuffer(ReplayBuffer):
    """Transitions drawn in proportion to (priority + eps)^alpha; new ones have the largest priority so far.

    `beta` is the exponent of the weights: a number, or a schedule of the `progress_remaining` that the algorithm sets.
    An algorithm must use `weights` and call `update_priorities`; a `DataWarning` reports one that does not. Everything
    else is inherited from `ReplayBuffer`. (Schaul et al., Prioritized Experience Replay, 2016.)
    """

    progress_remaining = 1.0
    """Remaining fraction of the training, from 1 to 0."""
    _num_drawn = 0
    """Number of batches that were drawn before the first update of priorities."""
    _is_updated = False

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.6,
        beta: float | Callable[[float], float] = _RISING_BETA,
        eps: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        self.alpha, self.beta, self.eps = alpha, FloatSchedule(beta), eps
        super().__init__(*args, **kwargs)
        # A subclass with its own `_get_samples` would draw uniformly by Stable-Baselines3's `sample`, so it is refused.
        if self._has_own_batches:
            remedy = "Override sample, and change the batch that super().sample returns."
            expected = "a class without its own _get_samples and conversions"
            raise SchemaError(explain("PrioritizedReplayBuffer", expected, type(self).__name__, remedy))

    def _make_sampler(self) -> Sampler:
        return Prioritized(self.alpha, lambda _: self.beta(self.progress_remaining), self.eps)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions by priority, normalised by `env`."""
        if not self._core_is_current:
            expected, remedy = "steps that were all added with add", "Add steps, and leave pos and full alone."
            raise SchemaError(explain(type(self).__name__, expected, f"pos = {self.pos}", remedy))
        if not self._is_updated:
            self._num_drawn += 1
            if self._num_drawn == _MAX_BATCHES_WITHOUT_UPDATE and self.alpha > 0:
                remedy = (
                    "Stable-Baselines3's own algorithms never update priorities, so draws stay uniform: use "
                    "PrioritizedDQN, PrioritizedSAC or PrioritizedTD3, or call update_priorities(batch.indices, errors)"
                )
                got = f"{_MAX_BATCHES_WITHOUT_UPDATE} batches and no update"
                message = explain(type(self).__name__, "update_priorities after sample", got, f"{remedy}.")
                warnings.warn(message, DataWarning, stacklevel=2)
        return super().sample(batch_size, env)

    def _make_samples(self, batch: TensorDict, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        weight = batch.get("weight", None)
        # A batch of `_get_samples` was not drawn by priority, so its weights are 1.
        if weight is None:
            weight = batch["reward"].new_ones(len(batch))
        samples: Any = super()._make_samples(batch, env)
        return PrioritizedReplayBufferSamples(
            *samples, weights=weight.to(self.device).unsqueeze(1), indices=batch["index"]
        )

    def update_priorities(self, indices: torch.Tensor, priorities: torch.Tensor | np.ndarray) -> None:
        """Set the priorities of the rows `indices`, such as absolute TD errors; overwritten rows are skipped."""
        values = torch.as_tensor(priorities, device="cpu").detach().reshape(-1)
        self._core.update_priority(indices, values)
        self._is_updated = True


class _PrioritizedAlgorithm(OffPolicyAlgorithm):
    """Base class of the prioritized algorithms, which draws batches, sets priorities and logs."""

    replay_buffer: Any

    def __init__(
        self, *args: Any, replay_buffer_class: type[PrioritizedReplayBuffer] = PrioritizedReplayBuffer, **kwargs: Any
    ) -> None:
        kwargs["replay_buffer_class"] = replay_buffer_class
        super().__init__(*args, **kwargs)

    @abstractmethod
    def _list_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose learning rate follows the schedule."""

    @abstractmethod
    def _update_networks(self, batch: PrioritizedReplayBufferSamples, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Update the networks with the batch number `step` of this call; yield names and values to log."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Draw `gradient_steps` batches, learn from each, and log the mean losses."""
        buffer = self.replay_buffer
        # A user may have loaded the replay buffer of another algorithm, which has no priorities.
        if not hasattr(buffer, "update_priorities"):
            got, remedy = f"a {type(buffer).__name__}", "Load one that a prioritized algorithm saved."
            raise SchemaError(explain("replay_buffer", "a PrioritizedReplayBuffer", got, remedy))
        buffer.progress_remaining = self._current_progress_remaining
        self.policy.set_training_mode(mode=True)
        self._update_learning_rate(self._list_optimizers())
        logged_values: dict[str, list[float]] = {}
        for step in range(gradient_steps):
            self._n_updates += 1
            for name, value in self._update_networks(buffer.sample(batch_size, env=self._vec_normalize_env), step):
                logged_values.setdefault(name, []).append(value.item())
        self.logger.record("train/beta", buffer.beta(self._current_progress_remaining))
        for name, numbers in logged_values.items():
            self.logger.record(f"train/{name}", np.mean(numbers))
        self.logger.record("train/n_updates", self._n_updates, "tensorboard")

    def _set_priorities(
        self, batch: PrioritizedReplayBufferSamples, values: Sequence[torch.Tensor], target: torch.Tensor
    ) -> None:
        """Set the rows' priorities to the critics' mean absolute TD errors."""
        errors = (torch.cat(tuple(values), 1) - target).abs().mean(1)
        self.replay_buffer.update_priorities(batch.indices, errors)

    def _update_target_networks(self, *names: str) -> None:
        """Move the target network of each network in `names` towards it, and copy the batch norm statistics."""
        for name in names:
            network, target = (getattr(self, each) for each in (name, f"{name}_target"))
            polyak_update(network.parameters(), target.parameters(), self.tau)
            prefix = "" if isinstance(self, SAC) else f"{name}_"
            statistics = (getattr(self, f"{prefix}batch_norm_stats{each}") for each in ("", "_target"))
            polyak_update(*statistics, tau=1)


class PrioritizedDQN(_PrioritizedAlgorithm, DQN):
    """DQN on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def _list_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.policy.optimizer]

    def _update_networks(self, batch: PrioritizedReplayBufferSamples, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            next_value = self.q_net_target(batch.next_observations).amax(1, keepdim=True)
            target = _compute_target(batch, next_value, self.gamma)
        value = self.q_net(batch.observations).gather(1, batch.actions.long())
        loss = (batch.weights * F.smooth_l1_loss(value, target, reduction="none")).mean()
        _take_optimizer_step(self.policy.optimizer, loss, self.policy.parameters(), self.max_grad_norm)
        self._set_priorities(batch, [value], target)
        yield "loss", loss


class PrioritizedSAC(_PrioritizedAlgorithm, SAC):
    """SAC on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        super().train(gradient_steps, batch_size)

    def _list_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers = self.actor.optimizer, self.critic.optimizer, self.ent_coef_optimizer
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def _update_networks(self, batch: PrioritizedReplayBufferSamples, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        if self.use_sde:
            self.actor.reset_noise()
        action, log_prob = self.actor.action_log_prob(batch.observations)
        if self.ent_coef_optimizer is None or self.log_ent_coef is None:
            temperature = self.ent_coef_tensor
        else:
            temperature = self.log_ent_coef.detach().exp()
            error = log_prob.detach() + float(self.target_entropy)
            _take_optimizer_step(self.ent_coef_optimizer, -(self.log_ent_coef * error).mean())
        yield "ent_coef", temperature

        with torch.no_grad():
            next_action, next_log_prob = self.actor.action_log_prob(batch.next_observations)
            next_values = torch.cat(self.critic_target(batch.next_observations, next_action), 1)
            next_value = next_values.amin(1, keepdim=True) - temperature * next_log_prob.unsqueeze(1)
            target = _compute_target(batch, next_value, self.gamma)
        values = self.critic(batch.observations, batch.actions)
        critic_loss = 0.5 * _compute_squared_error(batch, values, target)
        _take_optimizer_step(self.critic.optimizer, critic_loss)
        self._set_priorities(batch, values, target)
        yield "critic_loss", critic_loss

        value = torch.cat(self.critic(batch.observations, action), 1).amin(1)
        actor_loss = (temperature * log_prob.flatten() - value).mean()
        _take_optimizer_step(self.actor.optimizer, actor_loss)
        yield "actor_loss", actor_loss
        if step % self.target_update_interval == 0:
            self._update_target_networks("critic")


class PrioritizedTD3(_PrioritizedAlgorithm, TD3):
    """TD3 on a `PrioritizedReplayBuffer`; its `alpha`, `beta` and `eps` are `replay_buffer_kwargs`."""

    def _list_optimizers(self) -> list[torch.optim.Optimizer]:
        return [network.optimizer for network in (self.actor, self.critic)]

    def _update_networks(self, batch: PrioritizedReplayBufferSamples, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            limit = self.target_noise_clip
            noise = (torch.randn_like(batch.actions) * self.target_policy_noise).clamp(-limit, limit)
            next_action = (self.actor_target(batch.next_observations) + noise).clamp(-1, 1)
            next_values = torch.cat(self.critic_target(batch.next_observations, next_action), 1)
            target = _compute_target(batch, next_values.amin(1, keepdim=True), self.gamma)
        values = self.critic(batch.observations, batch.actions)
        critic_loss = _compute_squared_error(batch, values, target)
        _take_optimizer_step(self.critic.optimizer, critic_loss)
        self._set_priorities(batch, values, target)
        yield "critic_loss", critic_loss

        if self._n_updates % self.policy_delay == 0:
            actor_loss = -self.critic.q1_forward(batch.observations, self.actor(batch.observations)).mean()
            _take_optimizer_step(self.actor.optimizer, actor_loss)
            self._update_target_networks("critic", "actor")
            yield "actor_loss", actor_loss


def _compute_target(batch: PrioritizedReplayBufferSamples, next_value: torch.Tensor, gamma: float) -> torch.Tensor:
    discount = gamma if batch.discounts is None else batch.discounts
    return batch.rewards + discount * (1 - batch.dones) * next_value


def _compute_squared_error(
    batch: PrioritizedReplayBufferSamples, values: Sequence[torch.Tensor], target: torch.Tensor
) -> torch.Tensor:
    """Return the sum over critics of the weighted mean squared error."""
    return (batch.weights * (torch.cat(tuple(values), 1) - target) ** 2).mean(0).sum()


def _take_optimizer_step(
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    clipped_parameters: Iterable[torch.Tensor] | None = None,
    max_norm: float = 0.0,
) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clipped_parameters is not None:
        torch.nn.utils.clip_grad_norm_(clipped_parameters, max_norm)
    optimizer.step()
