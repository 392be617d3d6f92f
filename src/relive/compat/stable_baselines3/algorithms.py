# pyright: reportMissingImports=false
"""Stable-Baselines3's algorithms, with relive's buffers as default `rollout_buffer_class` and `replay_buffer_class`."""

from __future__ import annotations

from typing import Any

import stable_baselines3 as sb3
from gymnasium import spaces
from stable_baselines3.common import off_policy_algorithm, on_policy_algorithm

from relive.compat.stable_baselines3.replay import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from relive.compat.stable_baselines3.rollout import DictRolloutBuffer, RolloutBuffer
from relive.errors import explain


class OnPolicyAlgorithm(on_policy_algorithm.OnPolicyAlgorithm):
    """Base class of on-policy algorithms, which chooses a rollout buffer by the observation space."""

    rollout_buffer_class: Any
    _buffer_classes: tuple[Any, Any] = (RolloutBuffer, DictRolloutBuffer)

    def _setup_model(self) -> None:
        if self.rollout_buffer_class is None:
            self.rollout_buffer_class = self._buffer_classes[isinstance(self.observation_space, spaces.Dict)]
        super()._setup_model()


class OffPolicyAlgorithm(off_policy_algorithm.OffPolicyAlgorithm):
    """Base class of off-policy algorithms, which chooses a replay buffer as Stable-Baselines3 does.

    The choice depends on the observation space and `n_steps`.
    """

    replay_buffer_class: Any

    def _setup_model(self) -> None:
        n_steps = self.n_steps
        if self.replay_buffer_class is None:
            self.replay_buffer_class = self._choose_buffer_class()
            # `n_steps` is 1 during this call, because Stable-Baselines3 would warn that it ignores `n_steps`.
            self.n_steps = 1
        super()._setup_model()
        self.n_steps = n_steps

    def _choose_buffer_class(self) -> type[ReplayBuffer]:
        if isinstance(self.observation_space, spaces.Dict):
            if self.n_steps != 1:
                got, remedy = f"n_steps={self.n_steps}", "Flatten the observations, or use relive.NStep."
                raise AssertionError(explain("n_steps", "1 with Dict observations", got, remedy))
            return DictReplayBuffer
        if self.n_steps == 1:
            return ReplayBuffer
        self.replay_buffer_kwargs |= {"gamma": self.gamma, "n_steps": self.n_steps}
        return NStepReplayBuffer


class PPO(OnPolicyAlgorithm, sb3.PPO):
    """Stable-Baselines3's PPO on relive's rollout buffer."""


class A2C(OnPolicyAlgorithm, sb3.A2C):
    """Stable-Baselines3's A2C on relive's rollout buffer."""


class DQN(OffPolicyAlgorithm, sb3.DQN):
    """Stable-Baselines3's DQN on relive's replay buffer."""


class SAC(OffPolicyAlgorithm, sb3.SAC):
    """Stable-Baselines3's SAC on relive's replay buffer."""


class TD3(OffPolicyAlgorithm, sb3.TD3):
    """Stable-Baselines3's TD3 on relive's replay buffer."""


class DDPG(TD3, sb3.DDPG):
    """Stable-Baselines3's DDPG on relive's replay buffer."""
